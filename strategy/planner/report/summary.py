"""Says in a few short lines whether a plan fits, what it recomputes and offloads, and what takes the most memory."""

from __future__ import annotations

from thunder_memsave.planner.graph import Plan
from thunder_memsave.planner.report.explain import in_units, kind_name
from thunder_memsave.planner.simulate import Profile

_WIDTH = 50
"""Columns of a narrow terminal, within which each line stays."""


def plan_summary(plan: Plan, profile: Profile) -> list[str]:
    """Return three lines, four with offload, each of at most 50 columns; their numbers are those of the tables.

    Args:
        plan: The plan.
        profile: The memory of the program under it.
    """
    peak = in_units(profile.peak_bytes)
    if plan.budget_bytes is None:
        verdict = f"{peak} at the peak, no budget"
    else:
        fits = "fits" if profile.peak_bytes <= plan.budget_bytes else "does not fit"
        verdict = f"{fits}, {peak} of {in_units(plan.budget_bytes)}"
    return [f"plan: {verdict}", _recomputed(plan), *_offloaded(plan), _largest(profile)]


def _recomputed(plan: Plan) -> str:
    again = [d.nbytes for d in plan.decisions if not plan.actions[d.name].keeps]
    if not again:
        return "recompute: nothing, +0.00 ms"
    return f"recompute: {in_units(sum(again))}, +{plan.recompute_us / 1000:,.2f} ms per micro-batch"


def _offloaded(plan: Plan) -> list[str]:
    if not plan.offloaded_bytes:
        return []
    return [
        f"offload: {in_units(plan.offloaded_bytes)}, +{plan.exposed_us / 1000:,.2f} ms not hidden"
    ]


def _largest(profile: Profile) -> str:
    """Name the largest kinds of memory at the peak, as many as fit into the line."""
    by_kind = sorted(profile.peak_bytes_by_kind.items(), key=lambda pair: (-pair[1], pair[0]))
    first, *others = (f"{kind_name(kind)} {in_units(n)}" for kind, n in by_kind if n)
    line = f"largest: {first}"
    for other in others:
        if len(longer := f"{line}, {other}") > _WIDTH:
            break
        line = longer
    return line
