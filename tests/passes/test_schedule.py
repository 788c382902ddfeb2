"""Gathers start before they are needed and reductions end after they are started, within the window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from thunder.core import prims
from torch import nn

from harness import models
from harness.traces import Collective, LiveAt, collectives, fake_ranks, live_gathered
from thunder_memsave.compile import Compiled, CompiledModule
from thunder_memsave.passes.schedule import two_largest_blocks
from thunder_memsave.sharding import shard_module

IDS = models.token_batch()
NUM_LAYERS = 3


def llama(num_layers: int = NUM_LAYERS) -> nn.Module:
    torch.manual_seed(0)
    return models.llama(num_layers=num_layers)


def compiled(prefetch: int | str, *, mode: str = "zero3", num_layers: int = NUM_LAYERS) -> Compiled:
    model = llama(num_layers)
    with fake_ranks(2, mode=mode) as data_parallel:
        data_parallel = replace(data_parallel, prefetch=prefetch)  # type: ignore[arg-type]
        shard_module(model, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel)
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


def test_what_is_on_its_way_fits_into_the_window(ahead: tuple[int, Compiled]) -> None:
    window_bytes, result = ahead
    for trace in traces(result):
        assert max(map(beside, live_gathered(trace))) <= window_bytes


def test_twelve_layers_stay_within_the_window_and_keep_no_whole_weight() -> None:
    """What is gathered does not add up with the depth, and is gone when backward starts."""
    result = compiled("auto", num_layers=12)
    for trace in traces(result):
        assert max(map(beside, live_gathered(trace))) <= two_largest_blocks(llama())
    gathered = {c.name for c in collectives(traces(result)[1]) if c.kind == "all_gather"}
    assert len(gathered) > 12
    assert not live_gathered(traces(result)[0])[-1].live


def test_the_window_is_used(ahead: tuple[int, Compiled]) -> None:
    """At the fullest moment no other parameter would have fitted, or none was left."""
    window_bytes, result = ahead
    for trace in traces(result):
        sizes = [c.nbytes for c in collectives(trace) if c.kind == "all_gather"]
        fullest = max(map(beside, live_gathered(trace)))
        most = min(window_bytes, sum(sizes) - sizes[0])
        assert fullest >= max(most - max(sizes), min(sizes))


def test_a_window_of_zero_has_nothing_on_its_way(at_once: Compiled) -> None:
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
    """Bytes that are gathered, or being gathered, for later operations."""
    return sum(size for shard, size in point.live.items() if shard not in point.read)


def of_kind(trace: Any, kind: str) -> list[Collective]:
    return [c for c in collectives(trace) if c.kind == kind]
