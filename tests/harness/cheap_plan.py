"""The plan that recomputes what is cheap to recompute, with which searches begin."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_memsave.planner.actions import NO_ACTIONS
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.search.problem import problem_of


def cheap_plan(
    graph: TrainingGraph, costs_us: Sequence[float], memory: StepMemory | None = None
) -> Plan:
    """Return it."""
    problem = problem_of(graph, costs_us, memory or StepMemory(), NO_ACTIONS, 0)
    return problem.plan(problem.evaluate(problem.cheap), None, bound_us=0.0)
