"""Shards live in the module: layout, identity, gathering, and what is refused."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from harness.distributed import run_on_ranks
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding import summon
from thunder_memsave.sharding.row_errors import ShardedParameterError
from thunder_memsave.sharding.rows import (
    can_shard,
    gather_full,
    gather_rows,
    local_rows,
    num_real_rows,
    own_rows,
    shard_module,
    take_rows,
)
from thunder_memsave.sharding.sharded_parameter import (
    ShardedParameter,
    is_sharded,
    mark_sharded,
)
from thunder_memsave.sharding.summon import summon_full


class OddNet(nn.Module):
    """Odd dims, tied, frozen, bf16, 0-dim and 1-row parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 3)
        self.up = nn.Linear(3, 5)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.emb.weight
        self.up.weight.requires_grad_(False)
        self.mixed = nn.Parameter(torch.randn(4, 2, dtype=torch.bfloat16))
        self.single = nn.Parameter(torch.randn(1))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(3.0))


def make_odd_net() -> OddNet:
    torch.manual_seed(0)
    return OddNet()


def data_parallel(mode: str = "zero2") -> DataParallel:
    assert mode in ("none", "zero2")
    group = dist.new_group(timeout=timedelta(seconds=60))
    return DataParallel(mode=mode, group=group)  # type: ignore[arg-type]


def check_sharding(rank: int) -> None:
    dp = data_parallel()
    _check_layout(rank, dp)
    _check_optimizer_made_before_trains(dp)
    _check_summon(dp)
    _check_summon_within_summon(dp)
    _check_summon_that_fails_midway(dp)
    _check_refusals(dp)
    _check_replicas()
    _check_meta(rank, dp)
    _check_deepcopy(dp)
    _check_pickle(dp)
    _check_empty_parameters_are_replicated(dp)
    _check_shared_storage_is_refused(dp)
    _check_other_parameter_types_are_refused(dp)
    _check_float8_gathers(dp)


def _check_layout(rank: int, dp: DataParallel) -> None:
    net, whole = make_odd_net(), make_odd_net()
    before = dict(net.named_parameters())
    shard_module(net, dp)
    after = dict(net.named_parameters())
    assert list(before) == list(after)
    assert net.head.weight is net.emb.weight
    for name, p in after.items():
        reference = whole.get_parameter(name)
        assert p is before[name], name
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad == reference.requires_grad, name
        assert p.unsharded_shape == reference.shape, name  # type: ignore[attr-defined]
        assert torch.equal(gather_full(p, dp), reference), name
    emb = net.emb.weight
    assert emb.shape == (4, 3)
    assert num_real_rows(emb) == (4 if rank == 0 else 3)
    assert torch.equal(local_rows(emb, emb), whole.emb.weight[rank * 4 : rank * 4 + 4])
    if rank == 1:
        assert torch.equal(emb.data[3], torch.zeros(3))
        assert num_real_rows(net.single) == 0
        assert torch.equal(net.single.data, torch.zeros(1))
    assert not is_sharded(net.scale)
    assert torch.equal(gather_full(net.scale, dp), torch.tensor(2.0))


def _check_optimizer_made_before_trains(dp: DataParallel) -> None:
    net, whole = make_odd_net(), make_odd_net()
    for foreach in (False, True):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=foreach)
        reference = torch.optim.AdamW(whole.parameters(), lr=0.1, foreach=foreach)
        if foreach is False:
            shard_module(net, dp)
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            if p.requires_grad:
                p.grad = torch.zeros_like(p)
                local_rows(p.grad, p).fill_(1.0)
                q.grad = torch.ones_like(q)
        optimizer.step()
        reference.step()
        for (name, p), q in zip(net.named_parameters(), whole.parameters(), strict=True):
            assert torch.equal(gather_full(p, dp), q), name


def _check_summon(dp: DataParallel) -> None:
    net, whole = make_odd_net(), make_odd_net()
    shard_module(net, dp)
    ids = torch.tensor([6, 0])
    net.emb.weight.grad = grad = torch.ones(4, 3)
    with summon_full(net, dp):
        assert torch.equal(net.head(net.emb(ids)), whole.head(whole.emb(ids)))
        net.emb.weight.data.zero_()
    assert net.emb.weight.grad is grad
    assert torch.equal(gather_full(net.emb.weight, dp), whole.emb.weight)
    with summon_full(net, dp, writeback=True), torch.no_grad():
        net.emb.weight.fill_(3.0)
    assert torch.equal(gather_full(net.emb.weight, dp), torch.full((7, 3), 3.0))
    assert local_rows(net.emb.weight, net.emb.weight).sum() == num_real_rows(net.emb.weight) * 9
    assert net.emb.weight.data.sum() == num_real_rows(net.emb.weight) * 9, "padding was written"
    with (
        pytest.raises(ValueError, match=r"backward\(\) ran inside summon_full"),
        summon_full(net, dp),
    ):
        net.emb(ids).sum().backward()
    assert net.emb.weight.grad is grad
    assert is_sharded(net.emb.weight)


def _check_summon_within_summon(dp: DataParallel) -> None:
    net, whole = make_odd_net(), make_odd_net()
    shard_module(net, dp)
    for outer in (True, False):
        with summon_full(net, dp, writeback=outer), summon_full(net, dp):
            assert torch.equal(net.emb.weight, whole.emb.weight)
        assert is_sharded(net.emb.weight)
    with (
        summon_full(net, dp),
        pytest.raises(ValueError, match=r"'mixed'.* drop the changes .*pass writeback=True to the"),
        summon_full(net, dp, writeback=True),
    ):
        pass
    with (
        summon_full(net, dp, writeback=True),
        summon_full(net, dp, writeback=True),
        torch.no_grad(),
    ):
        net.emb.weight.fill_(3.0)
    assert torch.equal(gather_full(net.emb.weight, dp), torch.full((7, 3), 3.0))


def _check_summon_that_fails_midway(dp: DataParallel) -> None:
    """Gathering fails midway, as if the next weight did not fit the device."""
    net, whole = make_odd_net(), make_odd_net()
    shard_module(net, dp)
    net.emb.weight.grad = grad = torch.ones(4, 3)
    gathered: list[torch.Tensor] = []

    def gather(p: torch.Tensor, data_parallel: DataParallel) -> torch.Tensor:
        if len(gathered) == 3:
            raise torch.OutOfMemoryError("out of memory")
        gathered.append(gather_full(p, data_parallel))
        return gathered[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summon, "gather_full", gather)
        with pytest.raises(torch.OutOfMemoryError), summon_full(net, dp):
            raise AssertionError("not reached")
    assert is_sharded(net.emb.weight)
    assert net.emb.weight.grad is grad
    for name, p in net.named_parameters():
        assert torch.equal(gather_full(p, dp), whole.get_parameter(name)), name


def _check_refusals(dp: DataParallel) -> None:
    net = make_odd_net()
    shard_module(net, dp)
    with pytest.raises(ValueError, match=r"sharded already \('mixed' holds 2 rows\)"):
        shard_module(net, dp)
    with pytest.raises(ShardedParameterError, match=r"embedding\(\).*'emb.weight'.*\(7, 3\)"):
        net.emb(torch.tensor([0]))


def _check_replicas() -> None:
    dp = data_parallel("none")
    net = make_odd_net()
    shard_module(net, dp)
    assert not any(map(is_sharded, net.parameters()))
    assert vars(net.emb.weight)["unsharded_shape"] == (7, 3)
    with summon_full(net, dp):
        assert torch.equal(gather_full(net.emb.weight, dp), make_odd_net().emb.weight)


def _check_meta(rank: int, dp: DataParallel) -> None:
    with torch.device("meta"):
        net = OddNet()
    shard_module(net, dp)
    assert net.emb.weight.is_meta
    assert net.emb.weight.shape == (4, 3)
    assert num_real_rows(net.emb.weight) == 4 - rank


def _check_deepcopy(dp: DataParallel) -> None:
    net = make_odd_net()
    shard_module(net, dp)
    copied = copy.deepcopy(net)
    assert is_sharded(copied.emb.weight)
    assert copied.emb.weight is copied.head.weight
    assert copied.emb.weight is not net.emb.weight
    assert num_real_rows(copied.emb.weight) == num_real_rows(net.emb.weight)
    assert torch.equal(gather_full(copied.emb.weight, dp), make_odd_net().emb.weight)


def _check_pickle(dp: DataParallel) -> None:
    net = make_odd_net()
    shard_module(net, dp)
    loaded = pickle.loads(pickle.dumps(net))
    assert isinstance(loaded.emb.weight, ShardedParameter)
    assert loaded.emb.weight is loaded.head.weight
    assert not loaded.up.weight.requires_grad
    for name, p in make_odd_net().named_parameters():
        assert torch.equal(gather_full(loaded.get_parameter(name), dp), p), name
    assert is_sharded(copy.copy(net.emb.weight))


def _check_empty_parameters_are_replicated(dp: DataParallel) -> None:
    for shape in ((0, 4), (4, 0)):
        net = nn.ParameterDict({"empty": torch.empty(shape)})
        shard_module(net, dp)
        assert not is_sharded(net["empty"])
        assert net["empty"].shape == net["empty"].unsharded_shape == shape


def _check_shared_storage_is_refused(dp: DataParallel) -> None:
    storage = torch.randn(6, 4)
    for other in (storage[:2], storage.t(), storage[2:], storage.view(-1)[20:]):
        net = nn.ParameterDict({"one": storage, "other": nn.Parameter(other)})
        with pytest.raises(ValueError, match=r"'one' are two Parameters over one storage"):
            shard_module(net, dp)
    halves = nn.ParameterDict({"low": storage[:3], "high": nn.Parameter(storage[3:])})
    shard_module(halves, dp)
    assert torch.equal(gather_full(halves["high"], dp), storage[3:])


class Packed(nn.Parameter):
    """A quantized weight, whose data are not the weight's rows."""


def _check_other_parameter_types_are_refused(dp: DataParallel) -> None:
    net = nn.ParameterDict({"plain": torch.ones(4), "packed": Packed(torch.ones(4))})
    with pytest.raises(ValueError, match=r"'packed' is a Packed, .*sharding='none'"):
        shard_module(net, dp)
    assert not any(map(is_sharded, net.parameters()))
    shard_module(net, data_parallel("none"))
    assert type(net["packed"]) is Packed


def _check_float8_gathers(dp: DataParallel) -> None:
    whole = torch.arange(5.0).reshape(5, 1).to(torch.float8_e4m3fn)
    shard = take_rows(whole, own_rows(whole.shape, dp))
    gathered = gather_rows(shard, whole.shape, dp)
    assert torch.equal(gathered.float(), whole.float())


def test_shards_live_in_the_module_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(check_sharding, 2, tmp_path / "rendezvous")


def sharded(shape: tuple[int, ...] = (2, 3)) -> nn.Parameter:
    return mark_sharded(
        nn.Parameter(torch.ones(shape)),
        unsharded_shape=torch.Size((4, *shape[1:])),
        first_row=0,
        num_real_rows=shape[0],
        parameter_name="w",
    )


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: F.linear(torch.ones(2, 3), w),
        lambda w: F.linear(torch.ones(2, 3), weight=w),
        lambda w: torch.ones(5, 2) @ w,
        lambda w: w @ torch.ones(3, 2),
        lambda w: torch.ones(5, 3) @ w.T,
        lambda w: torch.ones(5, 3) @ w.t(),
        lambda w: torch.ones(5, 3) @ w.mT,
        lambda w: torch.einsum("bi,oi->bo", torch.ones(5, 3), w),
        lambda w: F.embedding(torch.tensor([0]), w),
        lambda w: w[torch.tensor([0, 1])],
        lambda w: torch.ones(5, 2, 3) * w,
        lambda w: torch.ones(5, 2, 3) + w,
        lambda w: F.layer_norm(torch.ones(2, 3), (2, 3), w),
        lambda w: nn.init.kaiming_uniform_(w),
        lambda w: nn.init.normal_(w),
        lambda w: torch.equal(w, torch.ones(4, 3)),
        lambda w: w[:1],
        lambda w: w.norm(),
        lambda w: torch.isfinite(w).all(),
    ],
)
def test_computing_with_a_shard_names_the_parameter_and_summon_full(compute) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShardedParameterError, match=r"'w' of shape \(4, 3\).*2 of its 4 rows.*sum"):
        compute(sharded())


def test_inspection_and_arithmetic_by_rows_are_allowed() -> None:
    w = sharded()
    assert type(w.data) is torch.Tensor
    assert w.data.norm() == 6**0.5
    assert w.shape == w.detach().shape == (2, 3)
    assert repr(w).startswith("Parameter containing")
    with torch.no_grad():
        assert torch.equal((w + torch.ones(2, 3)).data, torch.full((2, 3), 2.0))
        assert w.add_(torch.ones(2, 3)) is w
    assert w.requires_grad
    assert w.grad is None


def test_one_process_keeps_whole_parameters() -> None:
    net = make_odd_net()
    shard_module(net, None)
    assert not any(map(is_sharded, net.parameters()))
    assert vars(net.emb.weight)["unsharded_shape"] == (7, 3)
    assert gather_full(net.emb.weight, None).data_ptr() == net.emb.weight.data_ptr()
    assert not can_shard(torch.Size((4,)), None)
    with summon_full(net, None):
        assert torch.equal(net.emb.weight, make_odd_net().emb.weight)


def test_existing_gradients_are_refused_rather_than_dropped() -> None:
    net = make_odd_net()
    net.emb(torch.tensor([0])).sum().backward()
    with pytest.raises(ValueError, match=r"'emb.weight' has a gradient.*zero_grad"):
        shard_module(net, None)


def test_weights_tied_by_storage_only_are_refused() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = nn.Parameter(first.weight.data)
    net = nn.Sequential(first, second)
    with pytest.raises(ValueError, match=r"'1.weight' and '0.weight' are two Parameters over one"):
        shard_module(net, None)


class FakeGroup:
    """Stands in for the ranks of `own_rows`, which only counts."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


@pytest.mark.parametrize(("total", "world_size"), [(1, 4), (5, 4), (7, 2), (8, 4), (9, 8)])
def test_rows_of_all_ranks_cover_each_row_once(total: int, world_size: int) -> None:
    rows = [
        own_rows(torch.Size((total, 2)), FakeGroup(rank, world_size))  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    assert [i for r in rows for i in range(r.start, r.stop)] == list(range(total))
    assert {r.num_rows for r in rows} == {-(-total // world_size)}
