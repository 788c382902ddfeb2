"""Shows the stages of planning on stderr while they run, and adds up the time of each."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

from thunder_memsave.progress import Stage, listening

# Operations cannot be timed for a device that is absent.
STAGES: tuple[Stage, ...] = tuple(s for s in get_args(Stage) if s != "time operations")
"""Stages of planning, in order."""


class Progress:
    """Prints a line for each stage: `[ 3/11] capture ... 9.8 s`."""

    def __init__(self) -> None:
        self._cpu_s: dict[Stage, float] = {}
        self._num_begun: Counter[Stage] = Counter()
        self._running: Stage | None = None
        self._since = self._cpu_since = 0.0

    @property
    def cpu_seconds(self) -> Mapping[Stage, float]:
        """CPU seconds of this process, by stage."""
        return self._cpu_s

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the stages that run inside the context."""
        try:
            with listening(self._begin):
                yield
        finally:
            self._end()

    def say(self, text: str) -> None:
        """End the stage that runs, and show a line."""
        self._end()
        print(text, file=sys.stderr, flush=True)

    def _begin(self, stage: Stage) -> None:
        self._end()
        self._running = stage
        self._num_begun[stage] += 1
        number, again = STAGES.index(stage) + 1, self._num_begun[stage]
        shown = f"[{number:>2}/{len(STAGES)}] {stage}" + (f", try {again}" if again > 1 else "")
        print(f"{shown} ... ", end="", file=sys.stderr, flush=True)
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def _end(self) -> None:
        if self._running is None:
            return
        print(f"{time.perf_counter() - self._since:.1f} s", file=sys.stderr, flush=True)
        cpu_s = time.process_time() - self._cpu_since
        self._cpu_s[self._running] = self._cpu_s.get(self._running, 0.0) + cpu_s
        self._running = None
