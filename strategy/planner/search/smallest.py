"""Searches the plan with the smallest peak, by bisection over budgets."""

from __future__ import annotations

from dataclasses import replace

from thunder_memsave.planner.effort import BISECTION_SHARE, BISECTIONS, NEAR_BOUND
from thunder_memsave.planner.search.by_moments import search_moments
from thunder_memsave.planner.search.local_moves import drop
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.work import Work


def bisect(task: Task, work: Work) -> None:
    """Search by moments between the bound and the smallest known peak, until the budget's bytes are enough.

    The budgets that are tried do not depend on the task's, so the same plans are found for any.
    """
    low, most = task.bound_bytes, BISECTION_SHARE * work.left
    for _ in range(BISECTIONS):
        high = task.smallest.peak_bytes
        if high <= max(task.budget_bytes, low * (1 + NEAR_BOUND)) or work.is_over:
            return
        tried = replace(task, budget_bytes=(low + high) / 2)
        search_moments(tried, work.part(min(work.left, most)))
        if tried.best is None:
            drop(tried, work.part(min(work.left, most)))
        if tried.best is None:
            low = tried.budget_bytes
