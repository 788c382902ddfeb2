"""Searches the plan with the smallest peak, by bisection over budgets."""

from __future__ import annotations

import time

from thunder_memsave.planner.linear.pace import Pace
from thunder_memsave.planner.linear.peak_program import PeakModel
from thunder_memsave.planner.search.by_layers import Layers, search_layers
from thunder_memsave.planner.search.by_moments import search_moments
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator

_MOST_BUDGETS = 8
_NEAR = 2e-3
_MOST_S = 3.0
"""Seconds for one budget, in each of the two searches."""
_MERGED = (1, 2)


def search_smallest(
    model: PeakModel,
    evaluate: Evaluator,
    *,
    free: Evaluated,
    bound_bytes: float,
    enough_bytes: float,
    deadline_s: float,
    pace: Pace,
) -> None:
    """Bisect between the bound and the smallest known peak; the evaluator remembers the plans.

    The budgets that are tried do not depend on `enough_bytes`, so the same plans are found for any.

    Args:
        model: Provides needs, costs and pins.
        evaluate: Evaluator of the same graph.
        free: The plan of the free wins.
        bound_bytes: Lower bound on the peak of all plans.
        enough_bytes: A plan that needs no more ends the search.
        deadline_s: End of the search by `time.thread_time`: a busy machine does not change the plan.
        pace: Converts the time left into HiGHS's limits, which are wall-clock seconds.
    """
    low, found = bound_bytes, dict[int, Layers | None]()
    for _ in range(_MOST_BUDGETS):
        high = evaluate.smallest.peak_bytes
        budget_bytes = (low + high) / 2
        is_late = time.thread_time() > deadline_s
        if high <= max(enough_bytes, low * (1 + _NEAR)) or is_late:
            return
        until_s = min(deadline_s, time.thread_time() + _MOST_S)
        search_moments(
            model, evaluate, free=free, budget_bytes=budget_bytes, deadline_s=until_s, pace=pace
        )
        if evaluate.smallest.peak_bytes > budget_bytes:
            until_s = min(deadline_s, time.thread_time() + _MOST_S)
            search_layers(
                model,
                evaluate,
                budget_bytes=budget_bytes,
                deadline_s=until_s,
                merged=_MERGED,
                found=found,
            )
        if evaluate.smallest.peak_bytes > budget_bytes:
            low = budget_bytes
