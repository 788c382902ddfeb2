from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import pytest

from harness.training_graphs import GraphBuilder, chain, llama_like
from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.linear.peak_program import PeakModel, live_anyway
from thunder_memsave.planner.order import order
from thunder_memsave.planner.search.by_layers import find_layers, search_layers
from thunder_memsave.planner.search.evaluate import Evaluator
from thunder_memsave.planner.search.find_layers import Block, find_blocks
from thunder_memsave.planner.search.layer_plans import (
    BlockPlan,
    BlockPlans,
    BlockPrices,
    block_graph,
)
from thunder_memsave.planner.search.solve import solve
from thunder_memsave.planner.simulate import simulate

NUM_LAYERS = 6
STATE_BYTES = 16


@cache
def model() -> PeakModel:
    graph = llama_like(NUM_LAYERS, tokens=64, width=2048, hidden=6144, kv=256)
    return PeakModel(
        needs=needs(graph),
        costs_us=costs_us(graph, device("cpu")),
        memory=StepMemory(),
        generator_state_bytes=STATE_BYTES,
    )


@cache
def blocks() -> Sequence[Block]:
    return find_blocks(model().needs, model().costs_us)


def evaluator() -> Evaluator:
    return Evaluator(
        needs=model().needs,
        costs_us=model().costs_us,
        memory=StepMemory(),
        generator_state_bytes=STATE_BYTES,
    )


def names(graph: TrainingGraph, storages: Sequence[int]) -> list[str]:
    return [graph.storages[s].name for s in storages]


def test_layers_are_found_and_only_the_residual_stream_passes_between_them() -> None:
    before, *layers, after = blocks()
    assert len(layers) == NUM_LAYERS
    assert len({len(block.forward) for block in layers}) == 1
    graph = model().needs.graph
    passed = [names(graph, block.inputs) for block in layers]
    assert passed == [[], *([f"next{n}"] for n in range(NUM_LAYERS - 1))]
    assert len(before.backward) == 0
    assert after.backward.start == 0


def test_blocks_cover_forward_and_backward_once() -> None:
    graph = model().needs.graph
    forward = [o for block in blocks() for o in block.forward]
    backward = [p for block in reversed(blocks()) for p in block.backward]
    assert forward == list(range(graph.num_forward))
    assert backward == list(range(len(graph.ops) - graph.num_forward))


def test_several_layers_can_be_one_block() -> None:
    graph = llama_like(8, tokens=64, width=64, hidden=160, kv=16)
    found = find_blocks(needs(graph), costs_us(graph, device("cpu")), merged=2)
    assert len(found) == 4 + 2


def test_a_graph_without_layers_has_no_blocks() -> None:
    graph = chain(12)
    assert find_blocks(needs(graph), [1.0] * len(graph.ops)) == []
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"y": 10})
    b.backward(g=10)
    b.op("g y", {"dx": 10}, kind="gradient")
    assert find_blocks(needs(b.graph(outputs="y", gradients="dx")), [1.0, 1.0]) == []


def plans_of(number: int) -> BlockPlans:
    cut = block_graph(model().needs, model().costs_us, blocks()[number])
    return BlockPlans(
        cut=cut,
        constants=live_anyway(model().needs, StepMemory()),
        pinned={},
        memory=StepMemory(),
        generator_state_bytes=STATE_BYTES,
    )


def test_equal_layers_share_their_plans_and_the_first_and_last_do_not() -> None:
    layers = find_layers(model())
    assert layers is not None
    groups = [id(layer.plans) for layer in layers.layers]
    assert len(set(groups[2:-2])) == 1
    assert groups[1] not in groups[2:]


@pytest.mark.parametrize("us_per_byte", [0.0, 1e-4, 1e-2, 1.0])
def test_a_layers_peak_is_that_of_the_whole_graph_where_backward_is_in_it(
    us_per_byte: float,
) -> None:
    plans = plans_of(3)
    plan, _ = plans.cheapest(BlockPrices(saved_us_per_byte=us_per_byte, peak_us_per_byte=0.0))
    assert plan is not None
    whole, cut = model().needs, plans.cut
    here = {cut.needs.storages[n] for n in plan.keep}
    others = {s for s in whole.first if s not in set(cut.needs.storages)}
    found = evaluator()(here | others)
    earlier = {
        s for block in blocks()[:3] for s in whole.first if whole.producer[s] in block.forward
    }
    waiting = sum(whole.graph.storages[s].nbytes for s in earlier - set(cut.block.inputs))
    during = [
        nbytes
        for moment, nbytes in found.live_bytes.items()
        if moment.phase != "forward" and moment.position in cut.block.backward
    ]
    assert max(during) == plan.peak_bytes + waiting


def test_no_plan_of_a_layer_costs_less_than_its_bound() -> None:
    plans = plans_of(3)
    for saved, peak in [(0.0, 0.01), (1e-3, 1e-2), (1e-2, 1e-3)]:
        prices = BlockPrices(saved_us_per_byte=saved, peak_us_per_byte=peak)
        plan, bound_us = plans.cheapest(prices)
        assert plan is not None
        assert bound_us <= prices.of(plan) * (1 + 1e-9)
        for other in plans_at_many_prices(plans):
            assert bound_us <= prices.of(other) * (1 + 1e-9)


def plans_at_many_prices(plans: BlockPlans) -> Sequence[BlockPlan]:
    found = [
        plans.cheapest(BlockPrices(saved_us_per_byte=10.0**n, peak_us_per_byte=0.0))[0]
        for n in range(-6, 2)
    ]
    return [plan for plan in found if plan is not None]


# The bound mixes plans within a layer; with so few layers, one plan for each is far from that.
@pytest.mark.parametrize(("part", "most"), [(0.8, 1.1), (0.6, 2.0)])
def test_layers_put_together_fit_and_are_near_their_bound(part: float, most: float) -> None:
    evaluate = evaluator()
    free = evaluate(frozenset(model().needs.first))
    budget = int(part * free.peak_bytes)
    bound_us = search_layers(
        model(), evaluate, budget_bytes=budget, deadline_s=time.thread_time() + 30.0
    )
    best = evaluate.fastest_within(budget)
    assert best is not None
    program = order(model().needs.graph, keeping(names(model().needs.graph, sorted(best.keep))))
    assert simulate(program).peak_bytes <= budget
    assert 0 < bound_us <= best.recompute_us <= most * bound_us


def test_the_solvers_plan_says_how_near_it_is_to_the_best_of_layered_plans() -> None:
    graph, costs = model().needs.graph, model().costs_us
    free = solve(graph, budget_bytes=None, costs_us=costs)
    plan = solve(
        graph,
        budget_bytes=int(0.8 * free.predicted_peak_bytes),
        costs_us=costs,
        time_limit_s=4.0,
    )
    assert 0 < plan.layered_bound_us <= plan.recompute_us
    assert 0 <= plan.layered_gap < 0.1
    assert free.layered_gap == 0.0
