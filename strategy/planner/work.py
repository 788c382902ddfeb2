"""Counts the work of searches, so that a plan does not depend on how fast or busy the machine is.

Simulated steps, iterations of the simplex method and nodes of search trees are counted, and weighted such that a unit
is about a second of one core of a server of the 2020s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf


@dataclass
class _Done:
    units: float = 0.0


@dataclass(frozen=True)
class Work:
    """The work that a search may do. Parts of it count together: what one has done is done for all."""

    until: float = inf
    """Units, counted from the begin of the first search, after which this one ends."""
    _done: _Done = field(default_factory=_Done)

    @property
    def left(self) -> float:
        """Units that are left; negative if more was done."""
        return self.until - self._done.units

    @property
    def is_over(self) -> bool:
        """True if nothing is left."""
        return self.left <= 0

    def add(self, units: float) -> None:
        """Count work that was done."""
        self._done.units += units

    def part(self, units: float) -> Work:
        """Return work of so many units from now on, which may go on when this one is over."""
        return Work(self._done.units + units, self._done)
