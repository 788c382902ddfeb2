"""Collectives of a trace take the predicted bytes, exactly, on two and on three ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.devices import cpu
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import del_last_used
from thunder.executors.torchex import ex as torch_executor
from torch import Tensor

from harness.distributed import run_on_ranks
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from harness.traces import fake_ranks
from thunder_memsave.budget.extract import profiles
from thunder_memsave.budget.running_program import program
from thunder_memsave.ops.families.collectives import (
    all_gather,
    all_gather_bucket,
    all_reduce,
    all_reduce_bucket,
    reduce_scatter,
    reduce_scatter_bucket,
)
from thunder_memsave.planner.simulate import simulate

WAIT = torch_executor.opmap["torch_wait_prim_impl"]
ADD = torch_executor.opmap["add"]
SHAPES = ((6, 5), (12, 7), (6,))
ODD = ((7, 5), (12, 3), (1,))

Start = Callable[[Sequence[TensorProxy], dist.ProcessGroup], Any]
"""A function that starts collectives of a trace, and returns their futures."""


def gather(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return [all_gather(values[0], group, torch.float32)]


def cast_gather(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return [all_gather(values[0], group, torch.bfloat16)]


def gather_bucket(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return all_gather_bucket(values, group, torch.float32)


def cast_gather_bucket(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return all_gather_bucket(values, group, torch.float64)


def scatter(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return [reduce_scatter(values[0], group)]


def scatter_bucket(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return reduce_scatter_bucket(values, group)


def reduce(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return [all_reduce(values[0], group, False)]


def reduce_in_place(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return [all_reduce(values[0], group, True)]


def reduce_bucket(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return all_reduce_bucket(values, group, False)


def reduce_bucket_in_place(values: Sequence[TensorProxy], group: dist.ProcessGroup) -> Any:
    return all_reduce_bucket(values, group, True)


ROWS: tuple[Start, ...] = (
    gather,
    cast_gather,
    gather_bucket,
    cast_gather_bucket,
    scatter,
    scatter_bucket,
)
VALUES: tuple[Start, ...] = (
    reduce,
    reduce_in_place,
    reduce_bucket,
    reduce_bucket_in_place,
)


Body = Callable[[Sequence[TensorProxy]], Any]


def traced(body: Body, tensors: Sequence[Tensor]) -> TraceCtx:
    """Make a trace that returns the results of `body`."""
    trace = TraceCtx()
    with tracectx(trace):
        values = [
            TensorProxy(f"v{i}", shape=t.shape, device=cpu, dtype=to_dtype(t.dtype))
            for i, t in enumerate(tensors)
        ]
        trace.args, trace.kwargs = tuple(values), {}
        trace._siginfo = SigInfo.from_name_and_args("operation", trace.args)
        for v in values:
            prims.unpack_trivial(v, name=v.name)
        prims.python_return(body(values))
    return del_last_used(trace)


def waiting(start: Start, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> TraceCtx:
    """Make a trace that starts collectives, waits for them, and returns their results."""
    return traced(lambda values: tuple(map(WAIT, start(values, group))), tensors)


def check_peak(start: Start, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    trace = waiting(start, tensors, group)
    given = {f"v{i}": t for i, t in enumerate(tensors)}
    found = simulate(program(trace, None, tensors=given, known=profiles()))
    existing = found.live_bytes[0]
    run = trace.python_callable()
    run(*tensors)
    measured = measured_memory(lambda: run(*tensors))
    what = start, [tuple(t.shape) for t in tensors]
    assert found.peak_bytes - existing == measured.peak_bytes, what
    assert found.live_bytes[-1] - existing == measured.end_bytes, what


def check_all(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    plain = [torch.ones(shape) for shape in SHAPES]
    turned = [torch.ones(12, 6).t(), torch.ones(7, 6).t(), torch.ones(6, 2)[:, 0]]
    odd = [torch.ones(shape) for shape in ODD]
    with letting_go():
        for start in ROWS:
            check_peak(start, plain, group)
            check_peak(start, turned, group)
        for start in VALUES:
            check_peak(start, plain, group)
            check_peak(start, odd, group)
        for start in (reduce_bucket, reduce_bucket_in_place):
            check_peak(start, turned, group)


def test_two_ranks_take_the_bytes_of_the_rules(tmp_path: Path) -> None:
    run_on_ranks(check_all, 2, tmp_path / "rendezvous")


@pytest.mark.soak
def test_three_ranks_take_the_bytes_of_the_rules(tmp_path: Path) -> None:
    run_on_ranks(check_all, 3, tmp_path / "rendezvous")


@pytest.mark.parametrize("start", [scatter, scatter_bucket, gather, gather_bucket])
def test_on_cuda_sent_tensors_are_held_until_the_wait(start: Start) -> None:
    """Nccl holds its inputs, although the trace frees them: the other operation runs while both are live."""
    value = torch.ones(256, 4)

    def sums(values: Sequence[TensorProxy]) -> Any:
        (future, *_) = start([ADD(values[0], values[0])], group)
        other = ADD(values[0], values[0])
        return WAIT(future), other

    with fake_ranks(2) as data_parallel:
        group = data_parallel.group
        trace = traced(sums, [value])
        on_cpu, on_cuda = (
            simulate(program(trace, None, known=profiles(device_type=device_type)))
            for device_type in ("cpu", "cuda")
        )
    while_adding = 2  # the first sum, the collective, the second sum, the wait
    sent_bytes = value.nbytes
    assert on_cuda.live_bytes[while_adding] - on_cpu.live_bytes[while_adding] == sent_bytes
    assert on_cuda.live_bytes[-1] == on_cpu.live_bytes[-1]


def test_one_wait_ends_a_collective_of_several_and_frees_storages_without_a_name() -> None:
    values = [torch.ones(256, 4), torch.ones(256, 4)]

    def sums(values: Sequence[TensorProxy]) -> Any:
        first, second = (ADD(v, v) for v in values)
        futures = reduce_scatter_bucket([first, second], group)
        reduced = WAIT(futures[0])
        return reduced, ADD(first, first), WAIT(futures[1])

    with fake_ranks(2) as data_parallel:
        group = data_parallel.group
        found = simulate(program(traced(sums, values), None, known=profiles(device_type="cuda")))
    started, ended = found.live_bytes[3:5]
    assert started - ended == values[1].nbytes  # `first` is read once more
