from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from harness.all_plans import SEEDS, STATE_BYTES, all_plans, model_of
from harness.training_graphs import random_graph
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.linear.bounds import SAFE, least_bytes
from thunder_memsave.planner.linear.peak_program import Moment, PeakModel
from thunder_memsave.planner.search.evaluate import Evaluator
from thunder_memsave.planner.search.exact import Search


def search_of(seed: int, costs: Sequence[float]) -> Search:
    model = model_of(random_graph(seed), costs)
    evaluate = Evaluator(
        needs=model.needs,
        costs_us=costs,
        memory=StepMemory(),
        generator_state_bytes=STATE_BYTES,
    )
    evaluate(frozenset(model.needs.storages))
    return Search(model=model, evaluate=evaluate, deadline_s=time.thread_time() + 10)


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_bounds_stay_below_the_best_plan_by_the_solvers_tolerance(seed: int) -> None:
    graph = random_graph(seed)
    costs = [1.0 + n % 5 for n in range(len(graph.ops))]
    plans = all_plans(graph, costs)
    smallest = min(peak for peak, _ in plans)
    for budget in sorted({peak for peak, _ in plans})[:3]:
        search, best = search_of(seed, costs), min(us for peak, us in plans if peak <= budget)
        found = search.fastest(budget)
        assert found is not None
        assert found.recompute_us == pytest.approx(best)
        assert search.bound_us <= best * SAFE * (1 + 1e-9)
        assert search.relaxed_us(budget) <= best * SAFE * (1 + 1e-9)
    assert search_of(seed, costs).least_possible() <= smallest


def test_when_the_time_is_over_a_bound_asks_for_one_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = random_graph(SEEDS[0])
    costs = [1.0] * len(graph.ops)
    search, asked = search_of(SEEDS[0], costs), []
    moments = [Moment("forward", graph.num_forward), Moment("backward", 0), Moment("backward", 1)]
    search.model.corrections.update(dict.fromkeys(moments, 0.0))

    def counted(model: PeakModel, moments: Sequence[Moment], *, time_limit_s: float) -> float:
        asked.append((len(moments), time_limit_s))
        return least_bytes(model, moments, time_limit_s=time_limit_s)

    monkeypatch.setattr("thunder_memsave.planner.search.exact.least_bytes", counted)
    smallest = min(peak for peak, _ in all_plans(graph, costs))
    assert 0 < search.least_possible(deadline_s=0.0) <= smallest
    assert [number for number, _ in asked] == [1]
    assert asked[0][1] < 5.0  # a tenth of what is left of the search, and more on a busy machine
    asked.clear()
    assert 0 < search.least_possible() <= smallest
    assert [number for number, _ in asked] == [1, 2, 2, 3]


def test_a_bound_of_memory_is_an_integer_number_of_bytes() -> None:
    graph = random_graph(SEEDS[0])
    costs = [1.0] * len(graph.ops)
    search = search_of(SEEDS[0], costs)
    assert search.smallest().peak_bytes == search.bound_bytes == min(all_plans(graph, costs))[0]
