"""Keeps as many of the free wins as a budget has room for, where it does not force more than them.

To recompute all of them takes 4 to 6 % of a step of Llama 3.2 1B, by its rooflines on an H100, also where a few bytes
less than keeping all takes are asked for.
"""

from __future__ import annotations

from thunder_memsave.planner.search.evaluate import Evaluated
from thunder_memsave.planner.search.local_moves import alike
from thunder_memsave.planner.search.problem import Problem


def filled(problem: Problem, budget_bytes: float) -> Evaluated:
    """Return the plan of the free wins, with those kept that cost the most time per byte, in as many layers as fit.

    The last layers keep them: they are read first, and so free again when the rest of backward needs room.

    Args:
        problem: Of which the free wins fit, and keeping all does not.
        budget_bytes: What the plan may take; below the free wins' own peak they are all recomputed.
    """
    evaluate = problem.evaluate
    best = evaluate(problem.free)
    groups = _dearest_first(problem)
    for group in groups:
        low, high = 0, len(group)
        while low < high:
            count = (low + high + 1) // 2
            found = evaluate(best.keep | set(group[-count:]))
            low, high = (count, high) if found.peak_bytes <= budget_bytes else (low, count - 1)
        if low:
            best = evaluate(best.keep | set(group[-low:]))
    return best


def _dearest_first(problem: Problem) -> list[list[int]]:
    """Return groups of equal storages that are no longer kept, without those whose recomputation saves no time."""
    storages, missing = problem.needs.graph.storages, problem.all_kept - problem.free
    us = _again_us(problem, problem.free)
    found: list[tuple[float, list[int]]] = []
    for group in alike(problem.task(0).model):
        some = [s for s in group if s in missing]
        saved_us = us - _again_us(problem, problem.free | set(some)) if some else 0.0
        if saved_us > 0:
            found.append((saved_us / max(1, sum(storages[s].nbytes for s in some)), some))
    return [group for _, group in sorted(found, key=lambda pair: -pair[0])]


def _again_us(problem: Problem, keep: frozenset[int]) -> float:
    """Return the time of all that a plan recomputes, the free wins included."""
    return sum(problem.costs_us[o] for o in problem.evaluate.again(keep))
