from __future__ import annotations

import time
from functools import cache

from harness.training_graphs import chain
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.linear.pace import Pace
from thunder_memsave.planner.linear.peak_program import PeakModel
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator
from thunder_memsave.planner.search.smallest import search_smallest

GRAPH = chain(24)
COSTS = [1.0] * len(GRAPH.ops)


@cache
def smallest_of(*, enough_bytes: float) -> tuple[Evaluated, int]:
    """Return the smallest plan found, and the peak of keeping everything."""
    model = PeakModel(
        needs=needs(GRAPH), costs_us=COSTS, memory=StepMemory(), generator_state_bytes=16
    )
    evaluate = Evaluator(
        needs=model.needs, costs_us=COSTS, memory=StepMemory(), generator_state_bytes=16
    )
    free = evaluate(frozenset(model.needs.first))
    search_smallest(
        model,
        evaluate,
        free=free,
        bound_bytes=0.0,
        enough_bytes=enough_bytes,
        deadline_s=time.thread_time() + 20,
        pace=Pace(),
    )
    return evaluate.smallest, free.peak_bytes


def test_ever_smaller_plans_are_found_and_found_again_for_the_budget_that_they_need() -> None:
    found, free_bytes = smallest_of(enough_bytes=1)
    assert found.peak_bytes < 0.75 * free_bytes
    again, _ = smallest_of(enough_bytes=found.peak_bytes)
    assert again.peak_bytes == found.peak_bytes


def test_the_search_ends_with_a_plan_that_is_small_enough() -> None:
    smallest, free_bytes = smallest_of(enough_bytes=1)
    enough_bytes = (smallest.peak_bytes + free_bytes) / 2
    found, _ = smallest_of(enough_bytes=enough_bytes)
    assert smallest.peak_bytes <= found.peak_bytes <= enough_bytes
