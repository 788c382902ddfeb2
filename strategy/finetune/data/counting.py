"""Reports the progress of a long count on standard error."""

from __future__ import annotations

import sys
import time

from thunder_memsave.finetune.run_file.launch import is_first_local

_FIRST_AFTER_S = 3.0
_THEN_EVERY_S = 5.0


class Counting:
    """Counts, towards a total if there is one, and reports every few seconds; silent if short, or on other ranks."""

    def __init__(self, what: str, *, total: int | None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._start = time.monotonic()
        self._next_report = self._start + _FIRST_AFTER_S

    def add(self, number: int) -> None:
        """Add to the count."""
        self._done += number
        now = time.monotonic()
        if now >= self._next_report and is_first_local():
            self._next_report = now + _THEN_EVERY_S
            rate = self._done / (now - self._start)
            of = "" if self._total is None else f" of {self._total:,}"
            speed = f"{rate:,.0f}/s" if rate >= 1 else f"{1 / rate:,.1f} s each"
            line = f"{self._what}: {self._done:,}{of} ({speed})"
            print(line, file=sys.stderr, flush=True)
