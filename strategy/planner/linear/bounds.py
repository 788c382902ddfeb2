"""Bounds the recompute time and the peak of all plans by what must be live at single moments."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from thunder_memsave.planner.linear.cut_program import MomentProgram, backward_moment
from thunder_memsave.planner.linear.peak_program import Moment, PeakModel

_TIME_LIMIT_S = 60.0
SAFE = 1 - 1e-6
"""Factor that makes a bound of HiGHS safe: its tolerances let solutions violate a row a little."""


def least_us(
    model: PeakModel,
    budget_bytes: float,
    moments: Sequence[Moment],
    *,
    time_limit_s: float = _TIME_LIMIT_S,
) -> float:
    """Return a lower bound on the recompute time of plans within a budget, in microseconds; infinite if there are none.

    Args:
        model: Provides needs, costs and pins.
        budget_bytes: Bytes for the whole step.
        moments: Moments at which to count memory; a recomputation counts as the operation of backward after it.
        time_limit_s: Wall-clock seconds, after which the bound is 0.
    """
    program = MomentProgram(model, budget_bytes)
    for moment in dict.fromkeys(map(backward_moment, moments)):
        program.count(moment)
    return _least(program, time_limit_s) * model.unit_us


def least_bytes(
    model: PeakModel, moments: Sequence[Moment], *, time_limit_s: float = _TIME_LIMIT_S
) -> float:
    """Return a lower bound on the peak bytes of all plans.

    Args:
        model: Provides needs and pins.
        moments: As for `least_us`.
        time_limit_s: As for `least_us`.
    """
    program = MomentProgram(model, None)
    for moment in dict.fromkeys(map(backward_moment, moments)):
        program.count(moment)
    return _least(program, time_limit_s) * model.unit_bytes


def _least(program: MomentProgram, time_limit_s: float) -> float:
    solution = program.solve(time_limit_s=time_limit_s)
    return inf if solution.is_infeasible else max(0.0, solution.bound * SAFE)
