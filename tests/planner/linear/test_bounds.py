from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from harness.all_plans import SEEDS, all_plans, model_of
from harness.cheap_plan import cheap_plan
from harness.training_graphs import llama_like, random_graph
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import TrainingGraph
from thunder_memsave.planner.linear.bounds import (
    bound_bytes,
    bound_us,
    least_bytes,
    least_us,
)
from thunder_memsave.planner.linear.model import Model, Moment
from thunder_memsave.planner.search.solve import solve
from thunder_memsave.planner.work import Work


def all_moments(graph: TrainingGraph) -> list[Moment]:
    forward = [Moment("forward", p) for p in range(graph.num_forward + 1)]
    num_backward = len(graph.ops) - graph.num_forward
    return forward + [Moment("backward", p) for p in range(num_backward)]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_faster_or_smaller_than_its_bounds(seed: int) -> None:
    graph = random_graph(seed)
    costs = [1.0 + n % 5 for n in range(len(graph.ops))]
    model, plans, moments = model_of(graph, costs), all_plans(graph, costs), all_moments(graph)
    smallest = min(peak for peak, _ in plans)
    assert 0 < least_bytes(model, moments, Work()) <= smallest
    assert 0 < bound_bytes(model, moments, Work()) <= smallest
    for budget in sorted({peak for peak, _ in plans})[:6]:
        best = min(us for peak, us in plans if peak <= budget)
        assert least_us(model, budget, moments, Work()) <= best
        assert max(least_us(model, budget, [m], Work()) for m in moments) <= best
        assert bound_us(model, budget, moments, Work()) <= best


def test_more_moments_bound_no_worse() -> None:
    graph = random_graph(SEEDS[0])
    model, moments = model_of(graph, [1.0] * len(graph.ops)), all_moments(graph)
    alone = max(least_bytes(model, [m], Work()) for m in moments)
    assert least_bytes(model, moments, Work()) >= alone * (1 - 1e-5)


def test_when_the_work_is_over_a_bound_looks_at_one_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = random_graph(SEEDS[0])
    model, asked = model_of(graph, [1.0] * len(graph.ops)), []

    def counted(model: Model, moments: Sequence[Moment], work: Work) -> float:
        asked.append(len(moments))
        return least_bytes(model, moments, work)

    monkeypatch.setattr("thunder_memsave.planner.linear.bounds.least_bytes", counted)
    moments = [model.between, Moment("backward", 0), Moment("backward", 1)]
    assert bound_bytes(model, moments, Work(until=0.0)) > 0
    assert asked == [1]
    asked.clear()
    assert bound_bytes(model, moments, Work()) > 0
    assert asked == [1, 2, 2, 3]


def test_below_what_is_always_live_the_time_is_infinite() -> None:
    graph = random_graph(SEEDS[0])
    model, moments = model_of(graph, [1.0] * len(graph.ops)), all_moments(graph)
    assert least_us(model, least_bytes(model, moments, Work()) / 2, moments, Work()) == inf


def test_pinned_storages_are_kept_in_the_bound_too() -> None:
    graph = llama_like(2, tokens=64, width=64, hidden=160, kv=16)
    model = model_of(graph, costs_us(graph, device("cpu")))
    before_backward = [Moment("forward", graph.num_forward)]
    free = least_bytes(model, before_backward, Work())
    model.pinned = dict.fromkeys(model.needs.first, True)
    kept_bytes = sum(graph.storages[s].nbytes for s in model.needs.first)
    assert least_bytes(model, before_backward, Work()) == pytest.approx(free + kept_bytes, rel=1e-5)


@pytest.mark.parametrize("part", [0.7, 0.35])
def test_plans_for_llama_8b_are_near_the_bound_on_all_plans(part: float) -> None:
    graph = llama_like(32, tokens=8192, width=4096, hidden=14336, kv=1024)
    costs = costs_us(graph, device("h200"))
    cheap = cheap_plan(graph, costs)
    plan = solve(graph, budget_bytes=int(part * cheap.predicted_peak_bytes), costs_us=costs)
    assert 0 < plan.lower_bound_us <= plan.recompute_us
    assert plan.gap < 0.01
