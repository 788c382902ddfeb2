"""If a budget leaves less than the window, less is in flight, and the plan stays the one for the whole budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import DistParallelType, TensorProxy
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.executors.torchex import wait_prim_impl
from torch import nn

from harness import models
from harness.traces import LiveAt, fake_ranks, live_gathered
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.measure.devices import device_at
from thunder_memsave.ops.families.collectives import all_gather, is_wait, reduce_scatter
from thunder_memsave.passes.overlap.room import NO_ROOM, BudgetLeft, Room
from thunder_memsave.passes.overlap.schedule import schedule
from thunder_memsave.sharding.rows import shard_module

IDS = models.token_batch(8, 64)
WINDOW_BYTES = 10**9
NUM_COLUMNS = 5


def llama() -> nn.Module:
    torch.manual_seed(0)
    return models.llama(num_layers=3, tie_word_embeddings=False)


def compiled(prefetch: int, budget_bytes: int | None) -> tuple[Compiled, PlannedCall]:
    model = llama()
    with fake_ranks(64) as data_parallel:
        data_parallel = replace(data_parallel, prefetch=prefetch)
        shard_module(model, data_parallel)
        planner = MemoryPlanner(
            MemoryConfig(),
            device=device_at(torch.device("cpu")),
            budget_bytes=budget_bytes,
            data_parallel=data_parallel,
        )
        module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
        module(input_ids=IDS, labels=IDS)
    return module.captures[0], planner.calls[0]


@pytest.fixture(scope="module")
def unlimited() -> tuple[Compiled, PlannedCall]:
    return compiled(WINDOW_BYTES, None)


@pytest.fixture(scope="module")
def budget_bytes(unlimited: tuple[Compiled, PlannedCall]) -> int:
    return unlimited[1].profile.peak_bytes * 6 // 10


@pytest.fixture(scope="module")
def at_once(budget_bytes: int) -> tuple[Compiled, PlannedCall]:
    return compiled(0, budget_bytes)


@pytest.fixture(scope="module")
def exact(at_once: tuple[Compiled, PlannedCall]) -> tuple[Compiled, PlannedCall]:
    """The budget of `limited` with nothing in flight: for a little more bytes, another plan may be chosen."""
    return compiled(0, at_once[1].profile.peak_bytes)


@pytest.fixture(scope="module")
def limited(at_once: tuple[Compiled, PlannedCall]) -> tuple[Compiled, PlannedCall]:
    """The budget is exactly what the plan needs with nothing in flight."""
    return compiled(WINDOW_BYTES, at_once[1].profile.peak_bytes)


def ahead_bytes(result: Compiled) -> list[int]:
    """Bytes gathered for later operations, at each operation."""
    points = [
        p for t in (result.forward_traces, result.backward_traces) for p in live_gathered(t[-1])
    ]
    return list(map(beside, points))


def beside(point: LiveAt) -> int:
    return sum(nbytes for shard, nbytes in point.live.items() if shard not in point.read)


def test_what_is_planned_is_what_runs_with_nothing_in_flight(
    at_once: tuple[Compiled, PlannedCall], budget_bytes: int
) -> None:
    """Clones share backward's gathers in the plan as in the trace, so the plan needs no second round."""
    call = at_once[1]
    assert call.plan is not None
    assert call.plan.budget_bytes == budget_bytes
    assert 0.97 * budget_bytes < call.profile.peak_bytes <= budget_bytes


def test_the_budget_limits_what_is_in_flight_and_not_what_is_kept(
    exact: tuple[Compiled, PlannedCall], limited: tuple[Compiled, PlannedCall]
) -> None:
    before, after = exact[1], limited[1]
    assert before.plan is not None
    assert after.plan is not None
    assert after.plan.actions == before.plan.actions
    assert after.profile.peak_bytes == before.profile.peak_bytes


def test_what_fits_is_in_flight(
    at_once: tuple[Compiled, PlannedCall], limited: tuple[Compiled, PlannedCall]
) -> None:
    held, in_flight_now = ahead_bytes(at_once[0]), ahead_bytes(limited[0])
    assert max(in_flight_now) > 4 * max(held)


def test_a_window_that_fits_is_not_limited(unlimited: tuple[Compiled, PlannedCall]) -> None:
    roomy, _ = compiled(WINDOW_BYTES, unlimited[1].profile.peak_bytes)
    assert ahead_bytes(roomy) == ahead_bytes(unlimited[0])


def test_without_room_nothing_is_in_flight(at_once: tuple[Compiled, PlannedCall]) -> None:
    for traces in (at_once[0].forward_traces, at_once[0].backward_traces):
        trace = without_del(traces[-1])
        names = list(map(names_of, trace.bound_symbols))
        again = schedule(trace, window_bytes=WINDOW_BYTES, room=NO_ROOM)
        assert list(map(names_of, again.bound_symbols)) == names
        ample = Room(left_bytes=dict.fromkeys(chain(*names), 10**12), start_bytes={})
        moved = schedule(trace, window_bytes=WINDOW_BYTES, room=ample).bound_symbols
        free = schedule(trace, window_bytes=WINDOW_BYTES).bound_symbols
        assert list(map(names_of, moved)) == list(map(names_of, free))


def without_del(trace: TraceCtx) -> TraceCtx:
    new = from_trace(trace)
    new.bound_symbols = [b for b in trace.bound_symbols if b.sym is not prims.python_del]
    return new


def names_of(bsym: Any) -> list[str]:
    return [o.name for o in bsym.flat_proxy_outs]


@pytest.mark.parametrize("num_in_flight", [0, 1, 3])
def test_as_many_reductions_are_in_flight_as_there_is_room_for(num_in_flight: int) -> None:
    """Each sends 40 bytes and receives 20; the room fits `num_in_flight`, and lacks one byte for one more."""
    trace = reductions(8)
    left_bytes = dict.fromkeys(values_of(trace), 60 * (num_in_flight + 1) - 1)
    ran = schedule(
        trace, window_bytes=WINDOW_BYTES, room=Room(left_bytes=left_bytes, start_bytes={})
    )
    assert max(in_flight(ran)) == num_in_flight


def test_reductions_are_waited_for_where_there_is_no_more_room() -> None:
    """Four operations have room for all, the fifth for one, the rest for all."""
    trace = reductions(8)
    left_bytes = dict.fromkeys(values_of(trace), 10**6) | {gradients(trace)[4]: 60}
    ran = schedule(
        trace, window_bytes=WINDOW_BYTES, room=Room(left_bytes=left_bytes, start_bytes={})
    )
    assert in_flight(ran) == [0, 1, 2, 3, 1, 2, 3, 4]


@pytest.mark.parametrize("bucket_bytes", [0, 10**6])
def test_room_for_one_operation_is_made_from_400_reductions(bucket_bytes: int) -> None:
    """Each result is cast, as in a model in bfloat16."""
    trace = reductions(400)
    left_bytes = dict.fromkeys(values_of(trace), 10**9) | {gradients(trace)[-1]: 0}
    ran = schedule(
        trace,
        window_bytes=WINDOW_BYTES,
        bucket_bytes=bucket_bytes,
        room=Room(left_bytes=left_bytes, start_bytes={}),
    )
    assert in_flight(ran)[-2:] == [398, 0]
    assert sorted(values_of(ran)) == sorted(values_of(trace))


def test_what_did_not_fit_into_a_bucket_joins_it_where_it_fits() -> None:
    """The large one fills the window; the two small ones fit only once it is read."""
    trace = gathers(5, 9, 2, 2)
    names = [b.output.name for b in trace.bound_symbols if b.sym.name == "linear"]
    left_bytes = dict.fromkeys(values_of(trace), 10**6) | {names[0]: 9 * 40 + 2 * 40}
    ran = schedule(
        trace,
        window_bytes=10 * 40,
        bucket_bytes=4 * 40,
        room=Room(left_bytes=left_bytes, start_bytes={}),
    )
    sizes = [len(b.flat_proxy_outs) for b in ran.bound_symbols if "all_gather" in b.sym.name]
    assert sizes == [1, 1, 2]


def reductions(number: int) -> TraceCtx:
    """Return a trace of gradients of 40 bytes, each averaged over two ranks, waited for, and cast."""

    def backward(x: TensorProxy, data_parallel: DataParallel) -> list[Any]:
        group, results = data_parallel.group, []
        for _ in range(number):
            future = reduce_scatter(prims.sin(x), group)
            results.append(prims.convert_element_type(wait_prim_impl(future), dtypes.bfloat16))
        return results

    return traced(backward)


def gathers(*num_rows: int) -> TraceCtx:
    """Return a trace with one operation per parameter; each of two ranks has that many rows, of 20 bytes."""

    def forward(x: TensorProxy, data_parallel: DataParallel) -> list[Any]:
        sharded = DistParallelType.FULLY_SHARDED
        shards = [tensor(f"w{i}", rows, sharded) for i, rows in enumerate(num_rows)]
        futures = [all_gather(shard, data_parallel.group, torch.float32) for shard in shards]
        return [prims.linear(x, wait_prim_impl(future), None) for future in futures]

    return traced(forward)


def traced(compute: Callable[[TensorProxy, DataParallel], list[Any]]) -> TraceCtx:
    trace = TraceCtx(lambda x: None)
    with fake_ranks(2) as data_parallel, tracectx(trace):
        x = tensor("x", 2)
        trace.args, trace.kwargs = (x,), {}
        prims.unpack_trivial(x, name="x")
        prims.python_return(compute(x, data_parallel))
    return trace


def tensor(name: str, num_rows: int, kind: DistParallelType = DistParallelType.NONE) -> TensorProxy:
    return TensorProxy(
        name,
        shape=(num_rows, NUM_COLUMNS),
        device=devices.cpu,
        dtype=dtypes.float32,
        distparallel_type=kind,
    )


def values_of(trace: TraceCtx) -> list[str]:
    return list(chain.from_iterable(map(names_of, trace.bound_symbols)))


def gradients(trace: TraceCtx) -> list[str]:
    return [b.output.name for b in trace.bound_symbols if b.sym.name == "sin"]


def in_flight(trace: TraceCtx) -> list[int]:
    """Count the gradients computed and not yet waited for, while each is computed."""
    results: list[int] = []
    num_waited = 0
    for bsym in trace.bound_symbols:
        num_waited += is_wait(bsym)
        if bsym.sym.name == "sin":
            results.append(len(results) - num_waited)
    return results


def left(*nbytes: int | None, for_others_bytes: int = 0) -> BudgetLeft:
    """Bytes left at symbols `t0`, `t1`, ...; None: a symbol that is not listed."""
    symbols: list[Any] = [
        SimpleNamespace(flat_proxy_outs=[SimpleNamespace(name=f"t{i}")]) for i in range(len(nbytes))
    ]
    known = {f"t{i}": n for i, n in enumerate(nbytes) if n is not None}
    room = Room(left_bytes=known, start_bytes={"t0": 7})
    return BudgetLeft(room, symbols, for_others_bytes=for_others_bytes)


def test_what_is_taken_is_left_again_after_its_end() -> None:
    here = left(10, 10, 4, 10)
    assert here.fits(10, 2)
    assert not here.fits(5, 3)
    assert here.fits(4, 3)
    here.take(4, 3)
    assert here.now == 6
    here.reach(2)
    assert here.now == 0
    assert not here.fits(1, 4)
    here.reach(3)
    assert here.now == 10


def test_a_symbol_of_which_nothing_is_known_has_what_the_one_before_has() -> None:
    here = left(None, 10, None, 4, None)
    for position, nbytes in enumerate([10, 10, 10, 4, 4]):
        here.reach(position)
        assert here.now == nbytes


def test_a_budget_that_is_exceeded_leaves_nothing() -> None:
    assert left(-3).now == 0


def test_a_third_or_less_is_left_for_reductions() -> None:
    here = left(10, 9, 8, for_others_bytes=3)
    assert here.fits(7, 1)
    assert not here.fits(8, 1)
    here.reach(2)
    assert here.fits(8, 3)


def test_a_collective_takes_what_it_takes_while_it_starts() -> None:
    assert left(1).start_bytes("t0", 3) == 7
    assert left(1).start_bytes("t9", 3) == 3
    assert BudgetLeft(None, [], for_others_bytes=0).start_bytes("t0", 3) == 3
