from __future__ import annotations

import pytest

from harness.all_plans import SEEDS, all_plans, model_of
from harness.cheap_plan import cheap_plan
from harness.training_graphs import llama_like, random_graph
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.linear.bounds import SAFE
from thunder_memsave.planner.linear.cut_program import MomentProgram
from thunder_memsave.planner.linear.model import Moment
from thunder_memsave.planner.search.solve import solve
from thunder_memsave.planner.work import Work


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_an_integer_program_bounds_all_plans(seed: int) -> None:
    graph = random_graph(seed)
    costs = [1.0 + n % 5 for n in range(len(graph.ops))]
    model, plans = model_of(graph, costs), all_plans(graph, costs)
    for budget in sorted({peak for peak, _ in plans})[:4]:
        program = MomentProgram(model, budget, integer=True)
        program.count(Moment("forward", graph.num_forward))
        program.count(Moment("backward", 0))
        solution = program.solve(Work())
        best_us = min(us for peak, us in plans if peak <= budget)
        assert not solution.is_infeasible
        assert solution.bound * model.unit_us * SAFE <= best_us


def test_a_loss_between_forward_and_backward_leaves_plans_near_the_bound() -> None:
    graph = llama_like(8, tokens=8192, width=4096, hidden=14336, kv=1024)
    costs, memory = costs_us(graph, device("h200")), StepMemory(between_bytes=12 << 30)
    cheap = cheap_plan(graph, costs, memory)
    budget = int(0.8 * cheap.predicted_peak_bytes)
    plan = solve(graph, budget_bytes=budget, costs_us=costs, memory=memory)
    assert plan.predicted_peak_bytes <= budget
    assert 0 < plan.lower_bound_us <= plan.recompute_us
    assert plan.gap < 0.01
