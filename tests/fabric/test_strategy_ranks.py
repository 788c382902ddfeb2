"""Fabric's contract on two ranks; each test is one spawn with several checks."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from harness.fabric import (
    all_gathered,
    all_reduced,
    make_fabric,
    on_fabric_rank,
    run_on_fabric_ranks,
)
from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.errors import CaptureError
from thunder_memsave.sharding.row_errors import ShardedParameterError
from thunder_memsave.sharding.same_on_all_ranks import RankMismatchError
from thunder_memsave.sharding.sharded_parameter import as_rows
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 2


class Odd(nn.Module):
    """Rows that two ranks cannot share evenly, a frozen weight, and a second method."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.down = nn.Linear(5, 3)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def until_small(self, x: Tensor) -> Tensor:
        y = self(x)
        while y.abs().sum() > 1:
            y = y / 2
        return y

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self(x)


class Lazy:
    """A tensor in a file, read when it is copied, as litgpt's `lazy_load` returns them."""

    def __init__(self, whole: Tensor) -> None:
        self.shape, self.whole = whole.shape, whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.whole if isinstance(a, Lazy) else a for a in args), **(kwargs or {}))


def build() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(seed: int) -> Tensor:
    """Return rows for both ranks, interleaved."""
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def strategy_of(fabric: Fabric) -> ThunderMemsaveStrategy:
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    return fabric.strategy


def own(fabric: Fabric, full: Tensor) -> Tensor:
    """Return this rank's rows of a whole tensor, without padding."""
    num_rows = -(-full.shape[0] // NUM_RANKS)
    return full[fabric.global_rank * num_rows :][:num_rows]


def padded_own(fabric: Fabric, full: Tensor) -> Tensor:
    num_rows = -(-full.shape[0] // NUM_RANKS)
    rows = own(fabric, full)
    return torch.cat([rows, rows.new_zeros(num_rows - len(rows), *rows.shape[1:])])


def test_sharded_models_keep_fabrics_contract() -> None:
    run_on_fabric_ranks(check_sharded, NUM_RANKS)


@on_fabric_rank
def check_sharded() -> None:
    fabric = make_fabric(devices=NUM_RANKS, timeout="2min")
    check_parameters_are_shards(fabric)
    check_state_dicts(fabric)
    check_accumulation_and_clipping(fabric)
    check_methods(fabric)
    check_whole_weights(fabric)
    check_optimizer_implementations(fabric)
    check_optimizers_with_whole_state_are_refused(fabric)
    check_other_initial_values_become_rank_zeros(fabric)
    check_a_model_that_one_rank_cannot_set_up(fabric)
    check_optimizers_that_see_only_shards_are_refused(fabric)
    check_copies(fabric)
    check_collectives_and_samplers(fabric)
    check_meta_models_start_alike(fabric)


def check_parameters_are_shards(fabric: Fabric) -> None:
    original, reference = build(), build()
    before = list(original.parameters())
    model = fabric.setup(original)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    for (name, p), full in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert "unsharded" not in name
        assert p.unsharded_shape == full.shape
        assert p.requires_grad == full.requires_grad
        torch.testing.assert_close(p.data, padded_own(fabric, full.detach()))


def check_state_dicts(fabric: Fabric) -> None:
    model, whole = fabric.setup(build()), build().state_dict()
    strategy = strategy_of(fabric)
    local = model.state_dict()
    assert local.keys() == whole.keys()
    for name, value in local.items():
        torch.testing.assert_close(value, own(fabric, whole[name]))
    model.load_state_dict({name: value + 1 for name, value in local.items()})
    for name, value in strategy.get_module_state_dict(model).items():
        torch.testing.assert_close(value, whole[name] + 1)
    strategy.load_module_state_dict(model, whole)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, own(fabric, whole[name]))
    for p, full in zip(model.parameters(), whole.values(), strict=True):
        assert p.data[len(own(fabric, full)) :].eq(0).all()  # padding stays zero
    plus = {name: value + 1 for name, value in whole.items()}
    for weights in (plus, {name: Lazy(value) for name, value in plus.items()}):
        model.load_state_dict(weights)
        for name, value in model.state_dict().items():
            assert torch.equal(value, own(fabric, plus[name]))
            assert torch.equal(value.to(torch.float64).full_tensor(), plus[name].double())
            with pytest.raises(
                ShardedParameterError, match=r"computed from 'up.weight'.*Gather the"
            ):
                (model.state_dict()["up.weight"] * 2).full_tensor()
    with pytest.raises(
        ValueError, match=r"rows of 'up.weight'.*model\.load_state_dict\(state_dict\)"
    ):
        strategy.load_module_state_dict(model, local)
    with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\) would replace"):
        model.load_state_dict(local, assign=True)
    with pytest.raises(RuntimeError, match=r"size mismatch for up.weight"):
        model.load_state_dict({**local, "up.weight": torch.zeros(9, 4)})
    kept = model._original_module.state_dict(keep_vars=True)
    assert kept["up.weight"] is model._original_module.up.weight


def check_accumulation_and_clipping(fabric: Fabric) -> None:
    reference = build()
    model, optimizer = build(), None
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for i in range(3):
        with fabric.no_backward_sync(model, enabled=i < 2):
            fabric.backward(model(batch(i)[fabric.global_rank :: NUM_RANKS]).square().mean())
        reference(batch(i)).square().mean().backward()
    check_gradients(fabric, model, reference)
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    check_gradients(fabric, model, reference)
    largest = fabric.clip_gradients(model, optimizer, max_norm=0.005, norm_type=torch.inf)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.005, norm_type=torch.inf)
    torch.testing.assert_close(largest, expected)
    fabric.clip_gradients(model, optimizer, clip_val=0.001)
    nn.utils.clip_grad_value_(reference.parameters(), 0.001)
    check_gradients(fabric, model, reference)


def check_gradients(fabric: Fabric, model: nn.Module, reference: nn.Module) -> None:
    for p, full in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (full.grad is None)
        if full.grad is not None:
            torch.testing.assert_close(p.grad, padded_own(fabric, full.grad))


def check_methods(fabric: Fabric) -> None:
    model, reference = fabric.setup(build()), build()
    model.mark_forward_method("doubled")
    for _ in range(2):
        torch.testing.assert_close(model.doubled(batch(0)), 2 * reference(batch(0)))
        torch.testing.assert_close(model(batch(0)), reference(batch(0)))
    model.mark_forward_method("until_small")
    for with_gradients in (True, False):  # in pieces, and all of it in eager PyTorch
        with torch.set_grad_enabled(with_gradients):
            result = model.until_small(batch(0))
        torch.testing.assert_close(result, reference.until_small(batch(0)))
    assert len(model._forward_module.captures) == 2  # doubled, forward
    model = make_fabric(devices=2, sharding="zero3", fullgraph=True).setup(build())
    model.mark_forward_method("until_small")
    advice = (
        r"`with torch.no_grad\(\), fabric.strategy.summon_full\(model\): model.module.until_small\("
    )
    with pytest.raises(CaptureError, match=advice):
        model.until_small(batch(0))
    with torch.no_grad(), strategy_of(fabric).summon_full(model):
        result = model.module.until_small(batch(0))
    torch.testing.assert_close(result, reference.until_small(batch(0)))


def check_whole_weights(fabric: Fabric) -> None:
    model, reference, strategy = fabric.setup(build()), build(), strategy_of(fabric)
    with pytest.raises(ShardedParameterError, match=r"strategy.summon_full\(module\)"):
        model.module.up(batch(0))
    with strategy.summon_full(model, writeback=True):
        torch.testing.assert_close(model.module(batch(0)), reference(batch(0)))
        with torch.no_grad():
            model.module.up.weight.mul_(2)
    with torch.no_grad():
        reference.up.weight.mul_(2)
    torch.testing.assert_close(model(batch(0)), reference(batch(0)))


def check_optimizer_implementations(fabric: Fabric) -> None:
    variants: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"amsgrad": True}]
    for options in variants:
        model, reference = build(), build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        expected = torch.optim.AdamW(reference.parameters(), lr=0.1, **options)
        model, optimizer = fabric.setup(model, optimizer)
        for i in range(2):
            fabric.backward(model(batch(i)).square().mean())
            optimizer.step()
            reference(batch(i)).square().mean().backward()
            expected.step()
        for p, full in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.data, padded_own(fabric, full.detach()))


def check_optimizers_with_whole_state_are_refused(fabric: Fabric) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="'exp_avg' has the whole weight's shape"):
        fabric.setup(model, optimizer)


def check_other_initial_values_become_rank_zeros(fabric: Fabric) -> None:
    torch.manual_seed(fabric.global_rank)
    model = fabric.setup(Odd())
    torch.manual_seed(0)
    expected = Odd()
    for p, full in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.data, padded_own(fabric, full.detach()))
    odd = nn.Linear(4, 4 + fabric.global_rank)
    with pytest.raises(
        RankMismatchError, match=r"'weight' has shape \(4, 4\) on rank 0 and \(5, 4\)"
    ):
        fabric.setup(odd)


def check_a_model_that_one_rank_cannot_set_up(fabric: Fabric) -> None:
    """The other rank stops with the reason, instead of waiting for the timeout."""
    bad = fabric.global_rank == 1
    expected = ValueError if bad else OtherRankError
    with_gradient, in_place, on_meta = build(), build(), build().to("meta")
    if bad:
        with_gradient(batch(0)).sum().backward()
        in_place.compile()
        vars(on_meta.down)["reset_parameters"] = None
    with pytest.raises(expected, match=r"'up.weight' has a gradient"):
        fabric.setup(with_gradient)
    with pytest.raises(expected, match=r"compiled in place"):
        fabric.setup(in_place)
    with pytest.raises(expected, match=r"'down.weight' is on the meta device"):
        fabric.setup(on_meta)


def check_optimizers_that_see_only_shards_are_refused(fabric: Fabric) -> None:
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS):
        model = build()
        weights = [p for p in model.parameters() if p.dim() == 2]
        with pytest.raises(
            ConfigError, match=rf"{cls.__name__} computes with whole weights.*AdamW"
        ):
            fabric.setup(model, cls(weights))


def check_copies(fabric: Fabric) -> None:
    model = fabric.setup(build())
    before = model(batch(0))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert not copied(batch(0)).any()
    torch.testing.assert_close(model(batch(0)), before)
    for p, original in zip(copied.parameters(), model.parameters(), strict=True):
        assert p.unsharded_shape == original.unsharded_shape


def check_collectives_and_samplers(fabric: Fabric) -> None:
    rank = torch.tensor(float(fabric.global_rank))
    assert all_reduced(fabric, rank.clone()).item() == 0.5  # Fabric reduces in place
    assert all_reduced(fabric, rank.clone(), reduce_op="sum").item() == 1.0
    assert all_reduced(fabric, rank.clone(), reduce_op="max").item() == 1.0
    assert all_reduced(fabric, rank.clone(), reduce_op=dist.ReduceOp.MIN).item() == 0.0
    assert all_reduced(fabric, torch.tensor(2 * fabric.global_rank)).item() == 1
    with pytest.raises(ValueError, match=r"'maxx', which torch\.distributed does not know"):
        fabric.all_reduce(rank.clone(), reduce_op="maxx")
    with mock.patch.object(dist, "barrier") as barrier:  # it would wait for the device
        fabric.all_reduce(rank.clone())
    barrier.assert_not_called()
    assert all_gathered(fabric, rank).tolist() == [0.0, 1.0]
    assert fabric.broadcast(fabric.global_rank, src=1) == 1
    assert not fabric.strategy.reduce_boolean_decision(fabric.global_rank == 0)
    assert fabric.strategy.reduce_boolean_decision(fabric.global_rank == 0, all=False)
    fabric.barrier()
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=1)
    seen = [int(row) for (row,) in fabric.setup_dataloaders(loader)]
    assert seen == [fabric.global_rank, fabric.global_rank + 2]


def check_meta_models_start_alike(fabric: Fabric) -> None:
    with fabric.init_module(empty_init=True):
        model = Odd()
    model = fabric.setup(model)
    output = model(batch(0))
    assert output.isfinite().all()
    assert len(set(all_gathered(fabric, output.sum().detach()).tolist())) == 1


def test_replicated_models_keep_fabrics_contract() -> None:
    run_on_fabric_ranks(check_replicated, NUM_RANKS)


@on_fabric_rank
def check_replicated() -> None:
    fabric = make_fabric(devices=NUM_RANKS, sharding="none")
    reference = build()
    model, optimizer = build(), None
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for i in range(2):
        fabric.backward(model(batch(i)[fabric.global_rank :: NUM_RANKS]).square().mean())
        reference(batch(i)).square().mean().backward()
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    for p, full in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, full.grad)
        assert p.shape == p.unsharded_shape
    with pytest.raises(ValueError, match="the model was set up before"):
        fabric.setup(model.module)


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    run_on_fabric_ranks(check_overflow, NUM_RANKS)


@on_fabric_rank
def check_overflow() -> None:
    plugin = MixedPrecision("16-mixed", device="cpu")
    fabric = make_fabric(devices=NUM_RANKS, plugins=[plugin])
    model = build()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(batch(0)).square().mean())
    if fabric.global_rank == 1:
        as_rows(model.module.up.weight.grad)[0, 0] = torch.inf
    before = copy.deepcopy(model.state_dict())
    assert plugin.scaler is not None
    scale = plugin.scaler.get_scale()
    optimizer.step()
    assert plugin.scaler.get_scale() == scale / 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    optimizer.zero_grad()
    fabric.backward(model(batch(0)).square().mean())
    optimizer.step()
    assert not torch.equal(model.state_dict()["up.weight"], before["up.weight"])


def test_one_process_under_torchrun_has_a_group_and_shares_nothing_over_it() -> None:
    run_on_fabric_ranks(check_group_of_one, 1)


@on_fabric_rank
def check_group_of_one() -> None:
    fabric = make_fabric(devices=1)
    model, reference = fabric.setup(build()), build()
    assert strategy_of(fabric).data_parallel is None
    assert torch.distributed.is_initialized()
    fabric.backward(model(batch(0)).sum())
    reference(batch(0)).sum().backward()
    for p, full in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, full.grad)
