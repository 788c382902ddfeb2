"""Adds the speed of a step to its metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class ThroughputMonitor:
    """Metrics `step_seconds` and `tokens_per_s`, the latter from the metric `num_tokens`.

    A step counts from its start to its end, without the evaluation in it. `num_tokens` counts
    target tokens over all ranks, so `tokens_per_s` leaves out padding and prompts.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start: float | None = None
        self._pause: float | None = None

    def on_train_batch_start(self) -> None:
        """Start the clock."""
        self._start = self._clock()

    def on_validation_start(self) -> None:
        """Stop the clock."""
        self._pause = self._clock()

    def on_validation_end(self) -> None:
        """Let the clock go on."""
        if self._start is not None and self._pause is not None:
            self._start += self._clock() - self._pause
        self._pause = None

    def on_train_batch_end(self, *, metrics: dict[str, Any]) -> None:
        """Add the metrics of the step."""
        if self._start is None:
            return
        seconds = self._clock() - self._start
        metrics["step_seconds"] = seconds
        if "num_tokens" in metrics and seconds > 0:
            metrics["tokens_per_s"] = metrics["num_tokens"] / seconds
