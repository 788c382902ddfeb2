"""Gathers start before they are needed and reductions end after they are started, within the window."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from thunder.core import prims
from thunder.core.trace import from_trace
from torch import nn

from harness import models
from harness.traces import (
    Collective,
    LiveAt,
    collectives,
    fake_ranks,
    live_gathered,
    unlimited_planner,
)
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.passes.overlap.schedule import schedule, two_largest_blocks
from thunder_memsave.passes.recompute import PREFIX
from thunder_memsave.sharding.rows import shard_module

IDS = models.token_batch()
NUM_LAYERS = 3


def llama(num_layers: int = NUM_LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return models.llama(num_layers=num_layers)


def compiled(
    prefetch: int | str,
    *,
    mode: str = "zero3",
    num_layers: int = NUM_LAYERS,
    memory: MemoryConfig | None = None,
) -> Compiled:
    """`memory`: as the strategy plans; None: backward keeps all that it reads."""
    model = llama(num_layers)
    with fake_ranks(2, mode=mode) as data_parallel:
        data_parallel = replace(data_parallel, prefetch=prefetch)  # type: ignore[arg-type]
        shard_module(model, data_parallel)
        planner = None if memory is None else unlimited_planner(memory, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
        module(input_ids=IDS, labels=IDS)
    return module.captures[0]


@pytest.fixture(scope="module")
def at_once() -> Compiled:
    return compiled(0)


@pytest.fixture(scope="module", params=[1_000, 8_000, "auto", 10**9])
def ahead(request: pytest.FixtureRequest) -> tuple[int, Compiled]:
    prefetch = request.param
    result = compiled(prefetch)
    return two_largest_blocks(llama()) if prefetch == "auto" else prefetch, result


def traces(result: Compiled) -> tuple[Any, Any]:
    return result.forward_traces[-1], result.backward_traces[-1]


def test_what_is_in_flight_fits_into_the_window(ahead: tuple[int, Compiled]) -> None:
    window_bytes, result = ahead
    for trace in traces(result):
        assert max(map(beside, live_gathered(trace))) <= window_bytes


def test_twelve_layers_stay_within_the_window_and_keep_no_whole_weight() -> None:
    """Under the strategy's plan, gathered bytes do not grow with the depth, even where clones read the weights."""
    result = compiled("auto", num_layers=12, memory=MemoryConfig())
    forward, backward = traces(result)
    for trace in (forward, backward):
        assert max(map(beside, live_gathered(trace))) <= two_largest_blocks(llama())
        assert set(Counter(c.name for c in of_kind(trace, "all_gather")).values()) == {1}
    assert len(of_kind(backward, "all_gather")) > 12
    assert any(o.name.startswith(PREFIX) for b in backward.bound_symbols for o in b.flat_proxy_outs)
    assert not live_gathered(forward)[-1].live


@pytest.fixture(scope="module", params=[0, 30_000])
def with_clones(request: pytest.FixtureRequest) -> tuple[int, Compiled]:
    again = MemoryConfig(recompute=("model.layers.1",))
    return request.param, compiled(request.param, memory=again)


def test_what_clones_hold_for_a_later_operation_takes_room_in_the_window(
    with_clones: tuple[int, Compiled],
) -> None:
    """Beside the bytes that clones hold, which the plan decides, gathered bytes stay within the window."""
    window_bytes, result = with_clones
    points = live_gathered(result.backward_traces[-1])
    held = held_bytes(points)
    assert max(held) > 0
    for point, held_here in zip(points, held, strict=True):
        assert beside(point) <= max(window_bytes, held_here), point.symbol


def held_bytes(points: list[LiveAt]) -> list[int]:
    """Bytes of the weights that were read before each operation and will be read after it."""
    was_read: set[str] = set()
    held = []
    for point in points:
        held.append(sum(n for g, n in point.live.items() if g in was_read - point.read))
        was_read |= point.read
    return held


def test_the_window_is_used(ahead: tuple[int, Compiled]) -> None:
    """At the fullest moment no other parameter would have fitted, or none was left."""
    window_bytes, result = ahead
    for trace in traces(result):
        sizes = [c.nbytes for c in collectives(trace) if c.kind == "all_gather"]
        fullest = max(map(beside, live_gathered(trace)))
        most = min(window_bytes, sum(sizes) - sizes[0])
        assert fullest >= max(most - max(sizes), min(sizes))


def test_a_window_of_zero_has_nothing_in_flight(at_once: Compiled) -> None:
    for trace in traces(at_once):
        assert all(set(point.live) == point.read for point in live_gathered(trace))


def test_the_collectives_are_the_same_in_number_and_order(
    at_once: Compiled, ahead: tuple[int, Compiled]
) -> None:
    for before, after in zip(traces(at_once), traces(ahead[1]), strict=True):
        for kind in ("all_gather", "reduce_scatter"):
            assert of_kind(before, kind) == of_kind(after, kind)


def test_reductions_are_waited_for_within_half_the_window(ahead: tuple[int, Compiled]) -> None:
    window_bytes, result = ahead
    highest, in_flight = 0, {}
    for bsym in result.backward_traces[-1].bound_symbols:
        if bsym.sym.name.startswith("reduce_scatter"):
            (gradient, *_), (future,) = bsym.args, bsym.flat_proxy_outs
            in_flight[future.name] = gradient.numel * 4
        elif bsym.sym.name == "torch_wait_prim_impl":
            in_flight.pop(bsym.args[0].name, None)
        elif bsym.sym is not prims.python_del:
            highest = max(highest, sum(in_flight.values()))
    assert not in_flight
    assert highest <= window_bytes // 2
    assert highest > 0


def test_two_largest_blocks_are_those_of_the_module_list() -> None:
    model: Any = llama()
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert two_largest_blocks(model) == 2 * layer * 4
    assert two_largest_blocks(nn.Linear(3, 5)) == 2 * 15 * 4
    assert two_largest_blocks(nn.Identity()) == 0


def beside(point: LiveAt) -> int:
    """Bytes gathered or in flight for later operations."""
    return sum(size for shard, size in point.live.items() if shard not in point.read)


def of_kind(trace: Any, kind: str) -> list[Collective]:
    return [c for c in collectives(trace) if c.kind == kind]


def calls_to_schedule(num_layers: int) -> int:
    """Count calls of Python functions; with this window all parameters and all gradients are in flight at once."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for trace in traces(compiled(0, num_layers=num_layers)):
        without_del = from_trace(trace)
        symbols = [b for b in trace.bound_symbols if b.sym is not prims.python_del]
        without_del.bound_symbols = symbols
        sys.setprofile(count)
        schedule(without_del, window_bytes=10**9, bucket_bytes=0)
        sys.setprofile(None)
    return calls


def test_the_work_is_linear_in_the_number_of_layers() -> None:
    one, two, three = map(calls_to_schedule, (1, 2, 3))
    assert three - two == two - one
