"""The plan of the free wins, which `solve` takes where keeping all does not fit and it does."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_memsave.planner.actions import NO_ACTIONS
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.search.problem import problem_of


def plan_of_free_wins(
    graph: TrainingGraph, costs_us: Sequence[float], memory: StepMemory | None = None
) -> Plan:
    """Return it."""
    problem = problem_of(graph, costs_us, memory or StepMemory(), NO_ACTIONS, 0)
    return problem.plan(problem.evaluate(problem.free), None, bound_us=0.0)
