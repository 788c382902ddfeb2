"""Shows how far a run is: a live bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Rank 0 prints loss, learning rate, tokens per second, and each validation loss.

    Args:
        every_n_steps: Steps between two lines where there is no terminal; None prints about
            twenty lines per run.
        console: Where to; None is standard output.
    """

    def __init__(self, *, every_n_steps: int | None = None, console: Console | None = None) -> None:
        self.every_n_steps = every_n_steps
        self.console = console if console is not None else Console(highlight=False)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._first_step = 0
        self._start = 0.0

    def on_train_start(self, *, fabric: Fabric, step: int, num_steps: int) -> None:
        """Put up the bar, where there is a terminal."""
        if not fabric.is_global_zero:
            return
        self._first_step = step
        if self.every_n_steps is None:
            self.every_n_steps = max(num_steps // 20, 1)
        if self.console.is_terminal:
            self._bar = _make_bar(self.console)
            self._task = self._bar.add_task("train", total=num_steps, completed=step, text="")
            self._bar.start()

    def on_train_batch_end(
        self, *, fabric: Fabric, step: int, num_steps: int, metrics: Mapping[str, Any]
    ) -> None:
        """Move the bar, or print a line if it is time."""
        if not fabric.is_global_zero:
            return
        text = _summary(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif step == self._first_step + 1 or step % (self.every_n_steps or 1) == 0:
            self._print(f"step {step}/{num_steps} | {text}{self._time_left(step, num_steps)}")
        if step == self._first_step + 1:
            # Not from the start: the first step compiles, and says nothing of the others.
            self._start = time.perf_counter()

    def on_validation_end(self, *, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the validation loss, above the bar."""
        if fabric.is_global_zero:
            self._print(f"step {step} | val_loss {metrics['val_loss']:.4f}")

    def on_train_end(self) -> None:
        """Take the bar down."""
        self._stop()

    def on_exception(self) -> None:
        """Take the bar down, so that the error is readable."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False)

    def _time_left(self, step: int, num_steps: int) -> str:
        num_timed = step - self._first_step - 1
        if num_timed < 1:
            return ""
        per_step = (time.perf_counter() - self._start) / num_timed
        minutes, seconds = divmod(round(per_step * (num_steps - step)), 60)
        return f" | {minutes}:{seconds:02d} left"


def _make_bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TextColumn("<"),
        TimeRemainingColumn(),
        console=console,
    )


def _summary(metrics: Mapping[str, Any]) -> str:
    formats = {"loss": "{:.4f}", "lr": "{:.2e}", "grad_norm": "{:.3f}", "tokens_per_s": "{:,.0f}"}
    names = {"grad_norm": "grad norm", "tokens_per_s": "tokens/s"}
    return " | ".join(
        f"{names.get(key, key)} {template.format(metrics[key])}"
        for key, template in formats.items()
        if key in metrics
    )
