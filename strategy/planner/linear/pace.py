"""Turns time of this thread into that of the wall's clock, at which HiGHS looks: a busy machine has others to serve."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_SHORT_S = 0.1
"""What was measured over less says little."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How the two clocks have run since this was made."""

    start_wall_s: float = field(default_factory=time.perf_counter)
    start_own_s: float = field(default_factory=time.thread_time)

    @property
    def slowdown(self) -> float:
        """Seconds on the wall's clock for one of this thread, at least 1."""
        wall_s = time.perf_counter() - self.start_wall_s
        own_s = time.thread_time() - self.start_own_s
        return max(1.0, (wall_s + _SHORT_S) / (own_s + _SHORT_S))

    def wall_s(self, own_s: float) -> float:
        """How long the thread will take, on the wall's clock, to run so many seconds."""
        return own_s * self.slowdown
