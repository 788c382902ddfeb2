"""Mixes of keeping, recomputing and offloading: never slower than without offload, and near the best of all mixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, combinations
from math import inf
from typing import Any

import pytest

from harness.training_graphs import chain as training_chain
from harness.training_graphs import random_graph
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.actions import OFFLOAD, Actions, keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.offload.copies import with_copies
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.order import OrderError, order
from thunder_memsave.planner.search import mixes
from thunder_memsave.planner.search.mixes import FEW_CANDIDATES, OffloadTerms, solve_mix, timed
from thunder_memsave.planner.search.solve import solve
from thunder_memsave.planner.simulate import simulate

TERMS = OffloadTerms(
    rates=CopyRates(bytes_per_s=50e6, copy_us=0.1), host_bytes=10**6, least_bytes=1
)
STATE_BYTES = 16
NOTHING_ELSE = StepMemory()
PARTS = (0.85, 0.7, 0.55, 0.45, 0.35)
SEEDS = [
    seed
    for seed in range(16)
    if 3 <= len((found := needs(random_graph(seed))).storages) - len(found.must_keep) <= 6
]
"""Of graphs with few decisions, so that all mixes can be tried."""


def subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, k) for k in range(len(items) + 1))


def costs_of(graph: TrainingGraph) -> list[float]:
    return [1.0 + number % 3 for number in range(len(graph.ops))]


def every_mix(graph: TrainingGraph, budgets: list[int]) -> dict[int, float]:
    """Return the least time added by any mix, by budget; budgets that no mix fits are left out."""
    found, costs = needs(graph), costs_of(graph)
    best: dict[int, float] = {}
    movable = [s for s in found.first if graph.storages[s].kind == "activation"]
    for keep in subsets([s for s in found.storages if s not in found.must_keep]):
        kept = {*keep, *found.must_keep}
        try:
            program = order(
                graph,
                keeping(graph.storages[s].name for s in kept),
                generator_state_bytes=STATE_BYTES,
            )
        except OrderError:
            continue
        again_us = sum(costs[s.op.index] for s in program.steps if s.is_repeated)
        for away in subsets([s for s in movable if s in kept]):
            nbytes = simulate(with_copies(program, away)).peak_bytes
            here = keeping(graph.storages[s].name for s in kept)
            there = dict.fromkeys((graph.storages[s].name for s in away), OFFLOAD)
            actions = Actions({**here, **there})
            for budget in budgets:
                if nbytes > budget or again_us >= best.get(budget, 1e9):
                    continue
                plan = _plan(actions, budget)
                time = timed(plan, graph, costs, NOTHING_ELSE, TERMS, STATE_BYTES)
                best[budget] = min(best.get(budget, 1e9), again_us + time.exposed_us)
    return best


def _plan(actions: Actions, budget: int) -> Plan:
    return Plan(
        actions=actions,
        budget_bytes=budget,
        predicted_peak_bytes=0,
        keep_all_peak_bytes=0,
        saved_bytes=0,
        recompute_us=0.0,
        lower_bound_us=0.0,
        copies_within_bytes=budget,
    )


def mixed(graph: TrainingGraph, budget: int) -> Plan:
    return solve_mix(
        graph,
        budget_bytes=budget,
        costs_us=costs_of(graph),
        terms=TERMS,
        generator_state_bytes=STATE_BYTES,
    )


def budgets_of(graph: TrainingGraph) -> list[int]:
    return [int(part * keep_all_bytes(graph)) for part in PARTS]


@cache
def best_of(seed: int) -> dict[int, float]:
    graph = random_graph(seed)
    return every_mix(graph, budgets_of(graph))


def alone_us(graph: TrainingGraph, budget: int) -> float:
    """Return the recompute time without offload; infinite if no plan fits."""
    try:
        return solve(
            graph,
            budget_bytes=budget,
            costs_us=costs_of(graph),
            generator_state_bytes=STATE_BYTES,
        ).recompute_us
    except BudgetError:
        return inf


def keep_all_bytes(graph: TrainingGraph) -> int:
    return simulate(order(graph, generator_state_bytes=STATE_BYTES)).peak_bytes


@pytest.mark.parametrize("few", [pytest.param(FEW_CANDIDATES, marks=pytest.mark.soak), -1])
def test_mixes_are_near_the_best_of_all_and_never_slower_than_without_offload(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all sets of few values tried, and with the sets that the linear program proposes."""
    monkeypatch.setattr(mixes, "FEW_CANDIDATES", few)
    lost, num_offloading, num_bounded = [], 0, 0
    for seed in SEEDS:
        graph, best = random_graph(seed), best_of(seed)
        for budget in budgets_of(graph)[:3]:
            if budget not in best:
                with pytest.raises(BudgetError):
                    mixed(graph, budget)
                continue
            plan = mixed(graph, budget)
            assert plan.predicted_peak_bytes <= budget
            assert plan.added_us <= alone_us(graph, budget)
            num_offloading += bool(plan.actions.offloaded)
            assert plan.lower_bound_us <= best[budget] + 1e-6
            num_bounded += plan.lower_bound_us > 0
            lost.append((plan.added_us - best[budget]) / sum(costs_of(graph)))
    assert num_offloading >= 2
    assert num_bounded >= 1
    assert len(lost) >= 5
    assert sum(lost) / len(lost) < 0.01
    assert max(lost) < 0.1


def test_the_bound_of_a_refusal_is_below_every_mix() -> None:
    for seed in SEEDS:
        graph, best = random_graph(seed), best_of(seed)
        with pytest.raises(BudgetError, match=r"and below [0-9,]+ there is none") as refused:
            mixed(graph, 1)
        bound_bytes, smallest_bytes = refused.value.bound_bytes, refused.value.smallest_bytes
        assert bound_bytes is not None
        assert smallest_bytes is not None
        assert all(0 < bound_bytes <= budget for budget in best)
        assert mixed(graph, smallest_bytes).predicted_peak_bytes <= smallest_bytes


def test_the_host_holds_no_more_than_its_budget() -> None:
    graph = training_chain(8)
    budget = 740
    free = mixed(graph, budget)
    assert free.offloaded_bytes > 200
    terms = replace(TERMS, host_bytes=200)
    few = solve_mix(graph, budget_bytes=budget, costs_us=costs_of(graph), terms=terms)
    assert few.offloaded_bytes <= 200
    assert free.added_us <= few.added_us
    with pytest.raises(BudgetError):  # nor without offload
        solve_mix(
            graph, budget_bytes=700, costs_us=costs_of(graph), terms=replace(TERMS, host_bytes=0)
        )


def test_what_is_pinned_is_not_offloaded() -> None:
    graph = training_chain(8)
    pinned = keeping(["a1", "a2"])
    plan = solve_mix(graph, budget_bytes=1000, costs_us=costs_of(graph), terms=TERMS, pinned=pinned)
    assert plan.actions.offloaded
    assert not plan.actions.offloaded & {"a1", "a2"}


def test_what_fits_without_offload_is_not_offloaded() -> None:
    graph = training_chain(8)
    plan = mixed(graph, keep_all_bytes(graph))
    assert not plan.actions.offloaded
    assert plan == solve(
        graph,
        budget_bytes=keep_all_bytes(graph),
        costs_us=costs_of(graph),
        generator_state_bytes=STATE_BYTES,
    )


def test_what_is_known_not_to_fit_without_copies_is_not_searched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, budget = training_chain(8), 740
    found, last_resort = mixed(graph, budget), replace(TERMS, is_last_resort=True)
    searched: list[bool] = []

    def solve_and_see(*args: Any, **kwargs: Any) -> Plan:
        searched.append(bool(kwargs.get("pinned") and kwargs["pinned"].offloaded))
        return solve(*args, **kwargs)

    monkeypatch.setattr(mixes, "solve", solve_and_see)
    asked: dict[str, Any] = {"costs_us": costs_of(graph), "generator_state_bytes": STATE_BYTES}
    assert solve_mix(graph, budget_bytes=budget, terms=last_resort, **asked) == found
    with pytest.raises(BudgetError):
        solve_mix(graph, budget_bytes=1, terms=last_resort, **asked)
    assert searched
    assert all(searched)
    with pytest.raises(BudgetError):  # with nothing to copy there is no other error to raise
        solve_mix(graph, budget_bytes=1, terms=replace(last_resort, host_bytes=0), **asked)
    assert not searched[-1]


def test_a_large_value_that_backward_reads_soon_is_not_offloaded() -> None:
    """Its copies out and back take 20 us each, and there are 12 between its maker and its reader."""
    graph, name = training_chain(600), "a592"
    sizes = (replace(s, nbytes=1000) if s.name == name else s for s in graph.storages)
    graph = replace(graph, storages=tuple(sizes))
    plan = mixed(graph, int(0.4 * keep_all_bytes(graph)))
    assert len(plan.actions.offloaded) > 300
    assert name not in plan.actions.offloaded
    assert plan.added_us == 0
