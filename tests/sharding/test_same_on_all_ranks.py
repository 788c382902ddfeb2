"""Ranks that would train different models are told apart before they start; other values become rank 0's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness.distributed import run_on_ranks
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding import rank_zero_values
from thunder_memsave.sharding.rank_zero_values import take_rank_zero_values
from thunder_memsave.sharding.rows import shard_module
from thunder_memsave.sharding.same_on_all_ranks import (
    Digest,
    RankMismatchError,
    check_ranks_agree,
    checksum,
    differences,
    has_other_values,
    make_digest,
)


@dataclass(frozen=True)
class Config:
    sharding: str = "zero2"


def make_net(*, rows: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential()
    net.add_module("body", nn.Linear(4, 4, dtype=dtype))
    net.add_module("head", nn.Linear(4, rows, bias=False, dtype=dtype))
    net.register_buffer("step", torch.zeros(()))
    net.register_buffer("cache", torch.zeros(2), persistent=False)
    return net


def check_digest(rank: int) -> None:
    dp = DataParallel(mode="zero2", group=dist.new_group(timeout=timedelta(seconds=60)))

    def agree(net: nn.Module, config: Config | None = None) -> list[str]:
        return check_ranks_agree(net, config=config or Config(), data_parallel=dp)

    assert agree(make_net()) == []
    same_model_other_seed = make_net()
    torch.manual_seed(rank)
    assert agree(same_model_other_seed) == []
    sharded = make_net()
    shard_module(sharded, dp)
    assert agree(sharded) == []
    message = (
        r"^rank 1 disagrees with rank 0 before training starts: parameter 'head.weight' has shape "
        r"\(5, 4\) on rank 0 and \(6, 4\) on rank 1; build the same model on every rank\.$"
    )
    with pytest.raises(RankMismatchError, match=message):
        agree(make_net(rows=5 + rank))
    with pytest.raises(RankMismatchError, match=r"config.sharding is 'zero2' .* 'none' on rank 1"):
        agree(make_net(), Config(sharding=["zero2", "none"][rank]))
    check_values_of_rank_zero(rank, dp)


def check_values_of_rank_zero(rank: int, dp: DataParallel) -> None:
    odd = make_odd(seed=rank)
    names = check_ranks_agree(odd, config=None, data_parallel=dp)
    assert names == [
        "parameter 'body.weight'",
        "parameter 'body.bias'",
        "parameter 'head.weight'",
        "buffer 'step'",
        "buffer 'mask'",
        "buffer 'spectrum'",
        "buffer 'fp8'",
    ]
    pointers = [p.data_ptr() for p in odd.parameters()]
    with mock.patch.object(rank_zero_values._log, "warning") as warning:
        take_rank_zero_values(odd, names, device=torch.device("cpu"), data_parallel=dp)
    assert [p.data_ptr() for p in odd.parameters()] == pointers
    assert check_ranks_agree(odd, config=None, data_parallel=dp) == []
    expected = make_odd(seed=0).state_dict()
    assert all(checksum(t) == checksum(expected[n]) for n, t in odd.state_dict().items())
    assert warning.call_count == (1 if rank == 0 else 0)
    if rank == 0:
        message, *values = warning.call_args.args
        assert (message % tuple(values)).startswith(
            "the ranks had other initial values for 7 of the model's 8 tensors"
        )


def make_odd(*, seed: int) -> nn.Module:
    """Return a model in dtypes that backends do not know, and with a weight that is not contiguous."""
    net = make_net(seed=seed)
    head = net.get_submodule("head")
    weight = net.get_parameter("head.weight").detach()
    head.weight = nn.Parameter(weight.t().contiguous().t())
    net.get_buffer("step").fill_(seed)
    net.register_buffer("mask", torch.tensor([True, seed == 0]))
    net.register_buffer("spectrum", torch.full((2,), 1j * (seed + 1)))
    net.register_buffer("fp8", torch.full((2,), 1.0 + seed).to(torch.float8_e4m3fn))
    return net


def test_two_ranks_that_differ_both_get_one_error_naming_the_difference(tmp_path: Path) -> None:
    run_on_ranks(check_digest, 2, tmp_path / "rendezvous")


def first_difference(other: nn.Module, config: object = None) -> str:
    found = differences(
        make_digest(make_net(), config=None), make_digest(other, config=config), rank=1
    )
    return f"{found[0].what}; {found[0].advice}" if found else ""


def test_equal_models_have_no_difference() -> None:
    assert first_difference(make_net()) == ""


def test_dtype_trainable_set_and_missing_names_are_named() -> None:
    other = make_net(dtype=torch.bfloat16)
    assert "'body.weight' has dtype float32 on rank 0 and bfloat16 on rank 1" in (
        first_difference(other)
    )
    other = make_net()
    other.get_parameter("head.weight").requires_grad_(False)
    assert "'head.weight' is trainable on rank 0 and frozen on rank 1" in first_difference(other)
    other = make_net()
    other.add_module("extra", nn.LayerNorm(4))
    assert "parameter 'extra.weight' exists on rank 1 and not on rank 0" in first_difference(other)
    other = make_net()
    del other.step
    assert "buffer 'step' exists on rank 0 and not on rank 1" in first_difference(other)


def test_another_order_of_the_same_parameters_is_a_difference() -> None:
    other = make_net()
    body = other._modules.pop("body")
    other._modules["body"] = body
    assert "number 0 in the model's order is parameter 'body.weight' on rank 0" in (
        first_difference(other)
    )


def test_persistent_buffers_are_compared_by_value_and_caches_are_not() -> None:
    other = make_net()
    first = make_digest(make_net(), config=None)
    other.get_buffer("cache").fill_(3.0)
    other.get_buffer("step").fill_(3.0)
    digest = make_digest(other, config=None)
    assert [n for n in first.tensors if has_other_values(n, first, digest)] == ["buffer 'step'"]
    assert first_difference(other) == ""


def test_meta_parameters_have_no_values_to_compare() -> None:
    with torch.device("meta"):
        on_meta = make_net()
    digest = make_digest(on_meta, config=None)
    assert differences(digest, digest, rank=1) == []
    assert "no comparable values (it is on meta, or sharded) on rank 1" in (
        first_difference(on_meta)
    )


def test_versions_are_compared() -> None:
    digest = make_digest(make_net(), config=None)
    other = replace(digest, settings={**digest.settings, "version of torch": "1.0"})
    found = differences(digest, other, rank=3)
    installed = digest.settings["version of torch"]
    assert [d.what for d in found] == [
        f"version of torch is {installed} on rank 0 and 1.0 on rank 3"
    ]


def test_a_process_alone_compares_nothing() -> None:
    check_ranks_agree(make_net(), config=None, data_parallel=None)
    assert isinstance(make_digest(make_net(), config=None), Digest)


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float64", "uint8", "bool", "complex64", "float8_e4m3fn"],
)
def test_checksum_sees_one_changed_value_and_one_swapped_pair(dtype: str) -> None:
    t = torch.tensor([0, 1, 0, 1, 1, 0, 0]).to(getattr(torch, dtype))
    changed, swapped = t.clone(), t.clone()
    changed[6] = 1
    swapped[0], swapped[1] = t[1], t[0]
    assert len({checksum(x) for x in (t, t.clone(), changed, swapped)}) == 3


def test_checksum_is_the_same_for_a_strided_view_and_covers_all_chunks() -> None:
    t = torch.arange(12.0).reshape(3, 4)
    assert checksum(t.t()) == checksum(t.t().contiguous())
    long = torch.zeros((1 << 22) + 3, dtype=torch.int8)
    before = checksum(long)
    long[-1] = 1
    assert checksum(long) != before
    assert checksum(torch.zeros(0)) == 0
