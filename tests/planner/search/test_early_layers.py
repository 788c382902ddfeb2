from __future__ import annotations

import numpy as np
import pytest

from harness.all_plans import model_of, task_of
from harness.cheap_plan import cheap_plan
from harness.training_graphs import GraphBuilder
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.search.by_moments import search_moments
from thunder_memsave.planner.search.early_layers import EarlyBytes
from thunder_memsave.planner.search.find_layers import find_blocks
from thunder_memsave.planner.search.solve import solve
from thunder_memsave.planner.work import Work

NUM_LAYERS = 24
STREAM, BRANCH, BETWEEN = 256, 128, 2000


def residual_stream() -> TrainingGraph:
    """Layers add branches of two bytes to a stream of four, as mixed precision has them."""
    b = GraphBuilder()
    b.input("x0", STREAM, "batch")
    for n in range(NUM_LAYERS):
        b.op(f"x{n}", {f"a{n}": 4 * BRANCH}, flops=9, symbol="up", key="up")
        b.op(f"a{n}", {f"s{n}": 4 * BRANCH}, symbol="act", key="act")
        b.op(f"s{n}", {f"b{n}": BRANCH}, flops=9, symbol="down", key="down")
        b.op(f"b{n}", {f"w{n}": BRANCH}, symbol="cast", key="cast")
        b.op(f"w{n}", {f"v{n}": BRANCH}, symbol="scale", key="scale")
        b.op(f"x{n} v{n}", {f"x{n + 1}": STREAM}, symbol="add", key="add")
    b.op(f"x{NUM_LAYERS}", {"out": 10}, symbol="loss")
    b.backward(g=10)
    b.op("g", {f"g{NUM_LAYERS}": STREAM})
    for n in reversed(range(NUM_LAYERS)):
        b.op(f"g{n + 1} a{n} s{n} x{n}", {f"g{n}": STREAM})
    return b.graph(outputs="out", gradients="g0")


def costs(graph: TrainingGraph) -> list[float]:
    us = {"up": 100.0, "down": 100.0}
    return [us.get(op.symbol, 0.0) for op in graph.ops]


MEMORY = StepMemory(between_bytes=BETWEEN)


def model() -> Model:
    graph = residual_stream()
    return model_of(graph, costs(graph), MEMORY)


def kept(letters: str) -> frozenset[int]:
    storages = model().needs.graph.storages
    return frozenset(s for s in model().needs.storages if storages[s].name[0] in letters)


def early_of(keep: str) -> tuple[EarlyBytes, int]:
    found = task_of(model(), kept(keep)).start
    early = EarlyBytes(blocks=find_blocks(model().needs, model().costs_us))
    early.observe(found)
    return early, found.peak_bytes


def test_results_recomputed_before_backward_reaches_their_layer_are_live_until_then() -> None:
    early, _ = early_of(keep="ab")
    assert (early.made[1:NUM_LAYERS] == STREAM).all()
    in_turn, _ = early_of(keep="ax")
    assert (in_turn.made == 0).all()


def test_runs_of_layers_are_as_long_as_there_is_room() -> None:
    early, peak_bytes = early_of(keep="ab")
    assert early.first_layers(peak_bytes + NUM_LAYERS * STREAM) == []
    early.made[:], early.others = STREAM, np.zeros(len(early.blocks))
    assert early.first_layers(4.5 * STREAM) == list(range(len(early.blocks) - 5, 0, -5))
    assert early.first_layers(0) == list(range(len(early.blocks) - 1, 0, -1))


@pytest.mark.parametrize("part", [0.75, 0.6])
def test_several_layers_are_recomputed_together(part: float) -> None:
    task = task_of(model(), kept("abwvx"), part=part)
    search_moments(task, Work().part(20.0))
    assert task.best is not None
    passed = {s for block in find_blocks(model().needs, model().costs_us) for s in block.inputs}
    assert len(task.best.keep & passed) < NUM_LAYERS


def test_the_solver_finds_them_too() -> None:
    graph = residual_stream()
    cheap = cheap_plan(graph, costs(graph), MEMORY)
    budget = int(0.7 * cheap.predicted_peak_bytes)
    plan = solve(graph, budget_bytes=budget, costs_us=costs(graph), memory=MEMORY)
    assert plan.predicted_peak_bytes <= budget
    assert 0 < plan.lower_bound_us <= plan.recompute_us
