from __future__ import annotations

import time

import pytest

from harness.all_plans import SEEDS, STATE_BYTES, all_plans, model_of
from harness.training_graphs import llama_like, random_graph
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.linear.bounds import SAFE
from thunder_memsave.planner.linear.cut_program import MomentProgram
from thunder_memsave.planner.linear.pace import Pace
from thunder_memsave.planner.linear.peak_program import Moment
from thunder_memsave.planner.linear.program import Solution
from thunder_memsave.planner.search.by_moments import search_moments
from thunder_memsave.planner.search.evaluate import Evaluator
from thunder_memsave.planner.search.solve import solve


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_an_integer_program_bounds_all_plans(seed: int) -> None:
    graph = random_graph(seed)
    costs = [1.0 + n % 5 for n in range(len(graph.ops))]
    model, plans = model_of(graph, costs), all_plans(graph, costs)
    for budget in sorted({peak for peak, _ in plans})[:4]:
        program = MomentProgram(model, budget, integer=True)
        program.count(Moment("forward", graph.num_forward))
        program.count(Moment("backward", 0))
        solution = program.solve(time_limit_s=5)
        best_us = min(us for peak, us in plans if peak <= budget)
        assert not solution.is_infeasible
        assert solution.bound * model.unit_us * SAFE <= best_us


@pytest.mark.parametrize("slowdown", [1.0, 4.0])
def test_programs_get_the_time_that_is_left_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, slowdown: float
) -> None:
    graph = random_graph(SEEDS[0])
    costs = [1.0] * len(graph.ops)
    model, limits_s = model_of(graph, costs), []
    solve_program = MomentProgram.solve

    def recorded(self: MomentProgram, *, time_limit_s: float, gap: float = 1e-9) -> Solution:
        limits_s.append(time_limit_s)
        return solve_program(self, time_limit_s=time_limit_s, gap=gap)

    monkeypatch.setattr(MomentProgram, "solve", recorded)
    evaluate = Evaluator(
        needs=model.needs, costs_us=costs, memory=StepMemory(), generator_state_bytes=STATE_BYTES
    )
    search_moments(
        model,
        evaluate,
        free=evaluate(frozenset(model.needs.storages)),
        budget_bytes=min(peak for peak, _ in all_plans(graph, costs)),
        deadline_s=time.thread_time() + 5,
        pace=Pace(
            start_wall_s=time.perf_counter() - 1000 * slowdown,
            start_own_s=time.thread_time() - 1000,
        ),
    )
    assert 4.0 * slowdown < limits_s[0] < 5.1 * slowdown


def test_a_loss_between_forward_and_backward_leaves_plans_near_the_bound() -> None:
    graph = llama_like(8, tokens=8192, width=4096, hidden=14336, kv=1024)
    costs, memory = costs_us(graph, device("h200")), StepMemory(between_bytes=12 << 30)
    free = solve(graph, budget_bytes=None, costs_us=costs, memory=memory)
    budget = int(0.8 * free.predicted_peak_bytes)
    plan = solve(graph, budget_bytes=budget, costs_us=costs, memory=memory)
    assert plan.predicted_peak_bytes <= budget
    assert 0 < plan.lower_bound_us <= plan.recompute_us
    assert plan.gap < 0.01
