"""Searches plans for ever smaller budgets, as far down as some are found."""

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
"""For one budget, in each of two ways."""
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
    """Halve the distance to the bound again and again; the evaluator remembers the plans.

    Which budgets are tried does not depend on what is enough: the same plans are found for any.

    Args:
        model: For its needs, costs and pins.
        evaluate: Of the same graph.
        free: The plan of the free wins.
        bound_bytes: No plan needs less.
        enough_bytes: A plan that needs no more ends the search.
        deadline_s: On the clock of `time.thread_time`: a busy machine does not change the plan.
        pace: What HiGHS's limits are set by, since they are of the wall's clock.
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
