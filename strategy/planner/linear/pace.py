"""Converts this thread's CPU time into wall-clock time, which HiGHS's limits count: a busy machine slows the thread."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_SHORT_S = 0.1
"""Added to both clocks, so that a measurement over less time has little effect."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The ratio of the two clocks since this object was made."""

    start_wall_s: float = field(default_factory=time.perf_counter)
    start_own_s: float = field(default_factory=time.thread_time)

    @property
    def slowdown(self) -> float:
        """Wall-clock seconds per second of this thread, at least 1."""
        wall_s = time.perf_counter() - self.start_wall_s
        own_s = time.thread_time() - self.start_own_s
        return max(1.0, (wall_s + _SHORT_S) / (own_s + _SHORT_S))

    def wall_s(self, own_s: float) -> float:
        """Return the wall-clock seconds in which the thread gets `own_s` seconds of CPU time."""
        return own_s * self.slowdown
