"""Small parameters share a gather, and small gradients a reduction, within the window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import models
from harness.traces import collectives, fake_ranks, live_gathered, num_calls
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.sharding.rows import shard_module

IDS = models.token_batch()
KINDS = ("all_gather", "reduce_scatter")
NORM_BYTES = 32 * 4


def compiled(
    model: nn.Module, prefetch: int | str, bucket_bytes: int, mode: str = "zero3", **inputs: Any
) -> Compiled:
    with fake_ranks(2, mode=mode) as data_parallel:
        settings: dict[str, Any] = {"prefetch": prefetch, "bucket_bytes": bucket_bytes}
        data_parallel = replace(data_parallel, **settings)
        shard_module(model, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel)
        module(**(inputs or {"input_ids": IDS, "labels": IDS}))
    return module.captures[0]


def llama() -> nn.Module:
    torch.manual_seed(0)
    return models.llama(num_layers=3)


def traces(result: Compiled) -> tuple[Any, Any]:
    return result.forward_traces[-1], result.backward_traces[-1]


@pytest.fixture(scope="module")
def alone() -> Compiled:
    return compiled(llama(), 40_000, 0)


@pytest.fixture(scope="module", params=[4 * NORM_BYTES, 20_000, 10**9])
def joined(request: pytest.FixtureRequest) -> tuple[int, Compiled]:
    return request.param, compiled(llama(), 40_000, request.param)


def test_every_tensor_is_communicated_as_often_as_alone(
    alone: Compiled, joined: tuple[int, Compiled]
) -> None:
    for before, after in zip(traces(alone), traces(joined[1]), strict=True):
        assert sorted(map(repr, collectives(before))) == sorted(map(repr, collectives(after)))


def test_a_bucket_is_within_its_limit_and_of_small_ones_only(joined: tuple[int, Compiled]) -> None:
    bucket_bytes, result = joined
    for trace in traces(result):
        for bsym in trace.bound_symbols:
            if "bucket" in bsym.sym.name:
                whole = bsym.output if "gather" in bsym.sym.name else bsym.args[0]
                assert sum(p.numel * p.dtype.bytes for p in whole) <= bucket_bytes
                assert len(whole) > 1


def test_the_window_holds_with_buckets(joined: tuple[int, Compiled]) -> None:
    for trace in traces(joined[1]):
        for point in live_gathered(trace):
            ahead = (size for shard, size in point.live.items() if shard not in point.read)
            assert sum(ahead) <= 40_000


def test_small_ones_share_collectives(alone: Compiled, joined: tuple[int, Compiled]) -> None:
    """Gathers fill half a window each, reductions a quarter; four norms' bytes join some of the seven norms."""
    bucket_bytes, result = joined
    fewer = {"all_gather": 0.4, "reduce_scatter": 0.6}
    for before, after in zip(traces(alone), traces(result), strict=True):
        for kind in KINDS:
            number = sum(c.kind == kind for c in collectives(before))
            assert num_calls(before, kind) == number
            most = fewer[kind] if bucket_bytes > 4 * NORM_BYTES else 0.95
            assert num_calls(after, kind) <= most * number


def test_everything_is_one_collective_if_all_of_it_fits() -> None:
    result = compiled(llama(), 10**9, 10**9)
    forward, backward = traces(result)
    assert [num_calls(forward, k) for k in KINDS] == [1, 0]
    assert [num_calls(backward, k) for k in KINDS] == [1, 1]


def test_without_a_window_only_what_one_operation_reads_is_joined() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))
    result = compiled(model, 0, 10**9, input=torch.randn(3, 6))
    forward, backward = traces(result)
    # Weight and bias of the first, and of the norm.
    assert num_calls(forward, "all_gather") == len(collectives(forward)) - 2 == 3
    assert num_calls(backward, "reduce_scatter") == 5
    assert all(set(p.live) == p.read for t in (forward, backward) for p in live_gathered(t))


class Sums(nn.Module):
    """Four small parameters of two dtypes, in turns."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.float32, torch.float64)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(4, dtype=d)) for d in dtypes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x.to(p.dtype) * p).sum().double() for p in self.parts]).sum()


def test_each_dtype_has_buckets_of_its_own() -> None:
    forward, backward = traces(compiled(Sums(), 10**9, 10**9, x=torch.randn(4)))
    assert num_calls(forward, "all_gather") == 2
    assert len(collectives(forward)) == 4
    assert num_calls(backward, "reduce_scatter") == 2


@pytest.mark.parametrize(
    ("window_bytes", "bucket_bytes", "num_calls_expected"),
    [(0, 10**9, 5), (10**9, 0, 5), (10**9, 10**9, 1), (8 * NORM_BYTES // 4, 10**9, 4)],
)
def test_small_gradients_of_whole_weights_share_an_all_reduce(
    window_bytes: int, bucket_bytes: int, num_calls_expected: int
) -> None:
    """A quarter of the last window has room for two of the three vectors."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4, bias=False))
    result = compiled(model, window_bytes, bucket_bytes, mode="none", input=torch.randn(3, 6))
    backward = traces(result)[1]
    assert len(collectives(backward)) == 5
    assert num_calls(backward, "all_reduce") == num_calls_expected


def test_gradients_over_replicas_share_an_all_reduce() -> None:
    """Each follows a reduction of its own, which is waited for first."""
    with fake_ranks(4) as data_parallel:
        pairs: dict[str, Any] = {
            "group": dist.new_group([0, 1]),
            "replicas": dist.new_group([0, 2]),
        }
        window: dict[str, Any] = {"prefetch": 10**9, "bucket_bytes": 10**9}
        data_parallel = replace(data_parallel, world=data_parallel.group, **pairs, **window)
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        shard_module(model, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel)
        module(torch.randn(3, 6))
    backward = traces(module.captures[0])[1]
    assert [num_calls(backward, kind) for kind in ("reduce_scatter", "all_reduce")] == [1, 1]
    assert len(collectives(backward)) == 1 + 2 * 4  # one weight is gathered for backward
