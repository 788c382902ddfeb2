"""Bounds the recompute time and the peak of all plans by what must be live at a few moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from thunder_memsave.planner.effort import MOST_BOUNDING, MOST_BOUNDING_TOGETHER
from thunder_memsave.planner.linear.cut_program import MomentProgram, backward_moment
from thunder_memsave.planner.linear.model import Model, Moment
from thunder_memsave.planner.work import Work

SAFE = 1 - 1e-6
"""Factor that makes a bound of HiGHS safe: its tolerances let solutions violate a row a little."""
_Bound = Callable[[Sequence[Moment]], float]


def least_us(model: Model, budget_bytes: float, moments: Sequence[Moment], work: Work) -> float:
    """Return a lower bound on the recompute time of plans within a budget, in microseconds; infinite if there are none.

    Args:
        model: Provides needs, costs and pins.
        budget_bytes: Bytes for the whole step.
        moments: Moments at which to count memory; a recomputation counts as the operation of backward after it.
        work: Work, without which the bound is 0.
    """
    return _least(MomentProgram(model, budget_bytes), moments, work) * model.unit_us


def least_bytes(model: Model, moments: Sequence[Moment], work: Work) -> float:
    """Return a lower bound on the peak bytes of all plans; the arguments are those of `least_us`."""
    return _least(MomentProgram(model, None), moments, work) * model.unit_bytes


def bound_us(
    model: Model, budget_bytes: float, moments: Sequence[Moment], work: Work, *, enough: float = inf
) -> float:
    """Return the best of several bounds of `least_us`, each by few of the moments; the search ends at `enough`."""
    of = partial(least_us, model, budget_bytes, work=work)
    return _best(of, model.between, moments, work, enough)


def bound_bytes(model: Model, moments: Sequence[Moment], work: Work) -> float:
    """Return the best of several bounds of `least_bytes`, each by few of the moments."""
    return _best(partial(least_bytes, model, work=work), model.between, moments, work, inf)


def _best(
    of: _Bound, between: Moment, moments: Sequence[Moment], work: Work, enough: float
) -> float:
    """Bound by the moment between forward and backward, by it and each other one, and by the hardest together."""
    found = {between: of([between])}
    for moment in [m for m in moments if m != between][:MOST_BOUNDING]:
        if max(found.values()) >= enough or work.is_over:
            break
        found[moment] = of([between, moment])
    best = max(found.values())
    hardest = sorted(found, key=lambda m: (-found[m], m))[:MOST_BOUNDING_TOGETHER]
    if len(hardest) < 3 or best >= enough or work.is_over:
        return best
    return max(best, of(hardest))


def _least(program: MomentProgram, moments: Sequence[Moment], work: Work) -> float:
    for moment in dict.fromkeys(map(backward_moment, moments)):
        program.count(moment)
    solution = program.solve(work)
    return inf if solution.is_infeasible else max(0.0, solution.bound * SAFE)
