from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import chain as joined
from itertools import combinations
from math import inf

import pytest

from harness.cheap_plan import cheap_plan
from harness.training_graphs import GraphBuilder, chain, llama_like, random_graph
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.actions import KEEP, RECOMPUTE, REGATHER, REPLAY, Actions, keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.order import OrderError, order
from thunder_memsave.planner.search.solve import pareto, solve
from thunder_memsave.planner.simulate import simulate

STATE_BYTES = 16
SEEDS = [seed for seed in range(48) if 2 <= len(needs(random_graph(seed)).storages) <= 10]


def drawn_costs(graph: TrainingGraph, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.choice([1.0, 2.0, 3.5, 8.0]) if op.repeat != "free" else 0.0 for op in graph.ops]


def drawn_memory(seed: int) -> StepMemory:
    """The caller of every third graph has a loss of its own that may be the peak."""
    return StepMemory(between_bytes=120 if seed % 3 == 0 else 0)


@cache
def all_plans(seed: int) -> Sequence[tuple[int, float]]:
    """Return peak and recompute time of every plan, by trying them all."""
    graph = random_graph(seed)
    costs = drawn_costs(graph, seed)
    names = [graph.storages[s].name for s in needs(graph).storages]
    plans = []
    for keep in joined.from_iterable(combinations(names, k) for k in range(len(names) + 1)):
        try:
            program = order(graph, keeping(keep), generator_state_bytes=STATE_BYTES)
        except OrderError:
            continue
        again = [s.op.index for s in program.steps if s.is_repeated]
        us = sum(costs[index] for index in again)
        plans.append((simulate(program, drawn_memory(seed)).peak_bytes, us))
    return plans


def solved(seed: int, budget_bytes: int | None) -> Plan:
    graph = random_graph(seed)
    return solve(
        graph,
        budget_bytes=budget_bytes,
        costs_us=drawn_costs(graph, seed),
        memory=drawn_memory(seed),
        generator_state_bytes=STATE_BYTES,
    )


def test_the_random_graphs_have_everything_that_plans_must_mind() -> None:
    ops = [op for seed in SEEDS for op in random_graph(seed).ops]
    assert {op.repeat for op in ops} == {"free", "yes", "replay", "no"}
    assert any(len(op.makes) > 1 for op in ops)
    assert any(op.sent_bytes for op in ops)
    assert len(SEEDS) > 30


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_faster_than_the_solvers(seed: int) -> None:
    smallest = min(peak for peak, _ in all_plans(seed))
    largest = solved(seed, None).predicted_peak_bytes
    for budget in {smallest, (smallest + largest) // 2, largest - 1, largest}:
        if budget < smallest:
            continue
        plan = solved(seed, budget)
        assert plan.predicted_peak_bytes <= budget
        best = min(us for peak, us in all_plans(seed) if peak <= budget)
        assert plan.recompute_us == pytest.approx(best)
        assert plan.lower_bound_us <= best + 1e-6


@pytest.mark.parametrize("seed", SEEDS[:12])
def test_below_the_smallest_plan_there_is_none_and_the_error_says_so(seed: int) -> None:
    smallest = min(peak for peak, _ in all_plans(seed))
    with pytest.raises(BudgetError) as caught:
        solved(seed, smallest - 1)
    assert caught.value.smallest_bytes == smallest
    assert caught.value.bound_bytes is not None
    assert caught.value.bound_bytes <= smallest


def test_the_error_says_what_was_asked_what_is_possible_and_what_to_do() -> None:
    graph = chain(4)
    text = (
        "the budget is 100 bytes, and no plan was found that stays within it; the smallest budget for which one was "
        "found is 570 bytes (570B), and below 570 there is none. Raise the budget to that, lower the micro-batch size"
    )
    with pytest.raises(BudgetError, match=re.escape(text)):
        solve(graph, budget_bytes=100, costs_us=[1.0] * len(graph.ops))


def test_a_budget_that_needs_no_recomputation_costs_nothing() -> None:
    graph = chain(6)
    costs = [1.0] * len(graph.ops)
    free = solve(graph, budget_bytes=None, costs_us=costs)
    assert (free.recompute_us, free.lower_bound_us, free.gap) == (0.0, 0.0, 0.0)
    enough = solve(graph, budget_bytes=free.predicted_peak_bytes, costs_us=costs)
    assert enough.actions == free.actions
    assert enough.recompute_us == 0.0


@cache
def blocks() -> TrainingGraph:
    return llama_like(3, tokens=64, width=64, hidden=160, kv=16)


@cache
def cheap_plan_of_blocks() -> Plan:
    return cheap_plan(blocks(), costs_us(blocks(), device("cpu")))


@cache
def plans_of_blocks() -> Sequence[Plan]:
    """Return plans for falling budgets, each solved with those before as known plans."""
    graph, cheap = blocks(), cheap_plan_of_blocks()
    smallest = smallest_of_blocks().smallest_bytes
    assert smallest is not None
    plans: list[Plan] = []
    for part in (0.0, 0.3, 0.6, 0.9):
        budget = int(smallest + part * (cheap.predicted_peak_bytes - smallest))
        plans.append(
            solve(
                graph,
                budget_bytes=budget,
                costs_us=costs_us(graph, device("cpu")),
                known=plans,
                time_limit_s=3.0,
            )
        )
    return plans


@cache
def smallest_of_blocks() -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        solve(
            blocks(),
            budget_bytes=1,
            costs_us=costs_us(blocks(), device("cpu")),
            time_limit_s=3.0,
        )
    return caught.value


def test_plans_for_blocks_stay_within_their_budgets() -> None:
    for plan in plans_of_blocks():
        assert plan.budget_bytes is not None
        simulated = simulate(order(blocks(), plan.actions)).peak_bytes
        assert plan.predicted_peak_bytes == simulated <= plan.budget_bytes


def test_time_never_rises_with_the_budget() -> None:
    times = [plan.recompute_us for plan in plans_of_blocks()]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_known_plan_that_fits_is_not_given_up_for_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = plans_of_blocks()[1]
    monkeypatch.setattr(
        "thunder_memsave.planner.search.solve.least_bytes",
        lambda *_: known.predicted_peak_bytes + 1.0,
    )
    plan = solve(
        blocks(),
        budget_bytes=known.predicted_peak_bytes,
        costs_us=costs_us(blocks(), device("cpu")),
        known=[known],
        time_limit_s=1.0,
    )
    assert plan.predicted_peak_bytes <= known.predicted_peak_bytes
    assert plan.recompute_us <= known.recompute_us


def test_no_plan_is_faster_than_its_bound() -> None:
    for plan in plans_of_blocks():
        assert 0 <= plan.lower_bound_us <= plan.recompute_us


def test_the_smallest_plan_for_blocks_is_not_below_what_is_proven_possible() -> None:
    error = smallest_of_blocks()
    assert error.smallest_bytes is not None
    assert error.bound_bytes is not None
    assert 0.9 * error.smallest_bytes <= error.bound_bytes <= error.smallest_bytes


def test_the_curve_falls_to_nothing_and_is_below_every_plan() -> None:
    graph = blocks()
    curve = pareto(graph, costs_us=costs_us(graph, device("cpu")), num_points=6)
    budgets, times = zip(*curve, strict=True)
    assert list(budgets) == sorted(budgets)
    assert list(times) == sorted(times, reverse=True)
    kept = solve(graph, budget_bytes=None, costs_us=costs_us(graph, device("cpu")))
    assert curve[-1] == (kept.predicted_peak_bytes, 0.0)
    for plan in plans_of_blocks():
        within = [us for nbytes, us in curve if nbytes >= plan.predicted_peak_bytes]
        assert max(within) <= plan.recompute_us + 1e-6


def test_all_is_kept_where_that_fits_and_else_as_much_as_there_is_room_for() -> None:
    graph, cheap = blocks(), cheap_plan_of_blocks()
    costs = costs_us(graph, device("cpu"))
    fastest = solve(graph, budget_bytes=None, costs_us=costs)
    kept, peak = fastest.actions.kept, fastest.predicted_peak_bytes
    made = [s for o in graph.ops if o.repeat != "free" for s in o.makes]
    first = needs(graph).first
    assert {graph.storages[s].name for s in made if s in first} <= kept
    assert cheap.predicted_peak_bytes < peak == fastest.keep_all_peak_bytes
    assert solve(graph, budget_bytes=peak, costs_us=costs).actions == fastest.actions
    assert solve(graph, budget_bytes=None, policy="keep_all", costs_us=costs).actions.kept == kept

    least, plans = cheap.predicted_peak_bytes, []
    for budget in (least, (least + peak) // 2, peak - 1):
        plan = solve(graph, budget_bytes=budget, costs_us=costs)
        assert plan.predicted_peak_bytes <= budget
        plans.append(plan)
    times = [plan.recompute_us for plan in plans]
    assert cheap.recompute_us >= times[0] > times[1] > times[2] > fastest.recompute_us == 0.0
    spared = solve(graph, budget_bytes=peak - 1, costs_us=costs, spare_bytes=peak)
    assert spared.actions == plans[0].actions
    assert spared.budget_bytes == peak - 1


def test_the_rest_of_the_step_takes_part_of_the_budget() -> None:
    graph = chain(6)
    costs = [1.0] * len(graph.ops)
    memory = StepMemory(optimizer_bytes=500)
    free = solve(graph, budget_bytes=None, costs_us=costs)
    plan = solve(graph, budget_bytes=free.predicted_peak_bytes + 400, costs_us=costs, memory=memory)
    assert plan.recompute_us > 0
    assert plan.keep_all_peak_bytes == free.predicted_peak_bytes + 500


def dropout() -> TrainingGraph:
    b = GraphBuilder()
    b.input("x")
    b.input("w")
    b.op("w", {"whole": 300}, kind="gathered", sent_bytes=290)
    b.op("x whole", {"a": 400}, flops=10, source="model.py:7", module="layers.0")
    b.op("x", {"mask": 500}, repeat="replay")
    b.op("a mask", {"y": 10})
    b.backward(g=10)
    b.op("g mask whole", {"h": 10})
    b.op("h a", {"dx": 10}, kind="gradient")
    return b.graph(outputs="y", gradients="dx")


def test_decisions_give_an_action_for_each_storage_that_backward_reads() -> None:
    graph = dropout()
    costs = [3.0, 5.0, 7.0, 1.0, 1.0, 1.0]
    plan = solve(graph, budget_bytes=None, policy="recompute_all", costs_us=costs)
    found = {d.name: (plan.actions[d.name], d.cost_us) for d in plan.decisions}
    assert found == {"whole": (REGATHER, 3.0), "a": (RECOMPUTE, 5.0), "mask": (REPLAY, 7.0)}
    decision = next(d for d in plan.decisions if d.name == "a")
    assert (decision.nbytes, decision.source, decision.module) == (400, "model.py:7", "layers.0")
    kept = solve(graph, budget_bytes=None, costs_us=costs)
    assert kept.actions == keeping(found)
    assert {d.name for d in kept.decisions} == kept.actions.keys()
    assert kept.saved_bytes == 1200


def test_policies_look_at_no_budget() -> None:
    graph = chain(5)
    costs = [1.0] * len(graph.ops)
    everything = solve(graph, policy="keep_all", budget_bytes=1, costs_us=costs)
    least = solve(graph, policy="recompute_all", budget_bytes=1, costs_us=costs)
    assert everything.actions == keeping({"a1", "a2", "a3", "a4"})
    assert least.actions.kept < everything.actions.kept
    assert least.predicted_peak_bytes <= everything.predicted_peak_bytes
    assert everything.budget_bytes is None
    assert (everything.gap, least.gap) == (0.0, inf)  # no bound was looked for


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_has_an_action_for_all_that_backward_reads_and_for_nothing_else(seed: int) -> None:
    graph = random_graph(seed)
    plan = solve(
        graph, budget_bytes=None, policy="recompute_all", costs_us=drawn_costs(graph, seed)
    )
    made = {graph.storages[s].name for op in graph.ops[: graph.num_forward] for s in op.makes}
    there = {graph.storages[s].name for s in graph.inputs | graph.outputs | graph.cotangents}
    program = order(graph, plan.actions)
    again = {step.op.index for step in program.steps if step.is_repeated}
    backward = [op for op in graph.ops if op.index in again or op.index >= graph.num_forward]
    read = {graph.storages[s].name for op in backward for s in op.reads}
    assert plan.actions.keys() == (read & made) - there


def test_pinned_storages_are_decided_as_asked() -> None:
    graph = dropout()
    again = Actions({"a": RECOMPUTE})
    plan = solve(graph, budget_bytes=None, costs_us=[1.0] * 6, pinned=again)
    assert plan.actions == {"a": RECOMPUTE, "whole": KEEP, "mask": KEEP}
    assert {d.name: d.reason for d in plan.decisions}["a"] == "pinned"
    kept = keeping({"a"})
    least = solve(graph, budget_bytes=None, policy="recompute_all", costs_us=[1.0] * 6, pinned=kept)
    assert least.actions == {"a": KEEP, "whole": REGATHER, "mask": REPLAY}


def test_a_budget_below_the_update_is_refused_without_a_search() -> None:
    """No plan changes what the optimizer's update holds: the first that is smaller elsewhere has the smallest peak."""
    graph = llama_like(2)
    costs = costs_us(graph, device("h100"))
    peak = max(bytes_of for bytes_of, _ in pareto(graph, costs_us=costs))
    memory = StepMemory(update_peak_bytes=2 * peak)
    with pytest.raises(BudgetError) as refused:
        solve(graph, costs_us=costs, budget_bytes=peak, memory=memory, time_limit_s=inf)
    error = refused.value
    assert error.smallest_plan is not None
    assert error.smallest_bytes == error.bound_bytes == error.smallest_plan.predicted_peak_bytes
    assert error.smallest_bytes > 2 * peak
    again = solve(graph, costs_us=costs, budget_bytes=error.smallest_bytes, memory=memory)
    assert again.predicted_peak_bytes == error.smallest_bytes
