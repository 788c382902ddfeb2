"""Holds what every search gets: the graph's plans, those evaluated so far, and the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thunder_memsave.planner.linear.model import Model, Moment
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator

_PARTS = 12
"""Number of parts of backward, of each of which a bound looks at the highest moment."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A question for the fastest plan within a budget, or for the smallest plan."""

    model: Model
    evaluate: Evaluator
    """Remembers the plans that searches evaluate: their result."""
    start: Evaluated
    """A plan that keeps much, and does not fit: searches give up what it keeps."""
    budget_bytes: float
    """Bytes that plans should fit in; when the smallest plan is searched, a search ends with one that does."""
    bound_bytes: float = 0.0
    """Lower bound on the peak of all plans."""

    @property
    def best(self) -> Evaluated | None:
        """The fastest plan so far that fits."""
        return self.evaluate.fastest_within(self.budget_bytes)

    @property
    def smallest(self) -> Evaluated:
        """The smallest plan so far."""
        return self.evaluate.smallest


def highest_moments(found: Evaluated, over_bytes: float) -> Sequence[Moment]:
    """Return the moment of the peak in forward and in each part of backward, where it is above `over_bytes`."""
    return list(_highest(found, over_bytes))


def _highest(found: Evaluated, over_bytes: float) -> Iterator[Moment]:
    last = max((m.position for m in found.live_bytes if m.phase != "forward"), default=0)
    highest: dict[int, tuple[int, Moment]] = {}
    for moment, nbytes in found.live_bytes.items():
        part = -1 if moment.phase == "forward" else moment.position * _PARTS // (last + 1)
        if nbytes > max(over_bytes, highest.get(part, (0,))[0]):
            highest[part] = (nbytes, moment)
    for _, moment in highest.values():
        yield moment
