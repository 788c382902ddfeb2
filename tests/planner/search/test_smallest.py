from __future__ import annotations

from dataclasses import replace
from functools import cache

from harness.all_plans import model_of, task_of
from harness.training_graphs import chain
from thunder_memsave.planner.search.smallest import bisect
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.work import Work

GRAPH = chain(24)


@cache
def smallest_of(*, enough_bytes: float) -> Task:
    task = task_of(model_of(GRAPH, [1.0] * len(GRAPH.ops)))
    bisect(replace(task, budget_bytes=enough_bytes), Work().part(20.0))
    return task


def test_ever_smaller_plans_are_found_and_found_again_for_the_budget_that_they_need() -> None:
    task = smallest_of(enough_bytes=1)
    assert task.smallest.peak_bytes < 0.75 * task.start.peak_bytes
    again = smallest_of(enough_bytes=task.smallest.peak_bytes)
    assert again.smallest.peak_bytes == task.smallest.peak_bytes


def test_the_search_ends_with_a_plan_that_is_small_enough() -> None:
    task = smallest_of(enough_bytes=1)
    enough_bytes = (task.smallest.peak_bytes + task.start.peak_bytes) / 2
    found = smallest_of(enough_bytes=enough_bytes)
    assert task.smallest.peak_bytes <= found.smallest.peak_bytes <= enough_bytes
