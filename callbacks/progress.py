"""Shows the progress of a run: a live bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.fabric import Fabric
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.table import Column
from torch import Tensor

_BAR_SHARE = 8  # the bar takes 1/8 of the terminal's width


_OF_EVALUATIONS: Mapping[str, Callable[[float], str]] = {
    "val_perplexity": lambda value: f"perplexity {value:,.2f}",
    "val_reward_accuracy": lambda value: f"accuracy {value:.1%}",
    "val_reward_margin": lambda value: f"margin {value:.3f}",
}


class ProgressBar:
    """Prints losses, learning rate, speed, memory and time left, on rank 0.

    On a terminal it is one line that never wraps: fields that do not fit are left out, the least
    important first. The first step is shown as compiling, and is not in any average.

    Args:
        every_n_steps: Steps between two lines if there is no terminal; None prints about
            twenty lines per run.
        console: Where to print; None means standard output.
        clock: Returns seconds.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.console = console if console is not None else Console(highlight=False)
        self._clock = clock
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._first_step = 0
        self._num_steps = 0
        self._start = 0.0
        self._first_step_end: float | None = None
        self._tokens = self._seconds = 0.0
        self._num_unread = 0
        self._is_late = False
        self._known: dict[str, Any] = {}
        self._losses: dict[int, float] = {}
        self._captured: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        """Return the validation losses so far, so that the best is known."""
        return {"losses": dict(self._losses)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self._losses = dict(state_dict["losses"])

    def on_train_start(self, *, fabric: Fabric, step: int, num_steps: int) -> None:
        """Show the bar, if there is a terminal."""
        if not fabric.is_global_zero:
            return
        self._stop()  # the bar from before a rollback
        self._first_step, self._num_steps, self._start = step, num_steps, self._clock()
        if self.every_n_steps is None:
            self.every_n_steps = max(num_steps // 20, 1)
        if self.console.is_terminal and step < num_steps:
            self._bar = _make_bar(self.console)
            self._task = self._bar.add_task("", total=num_steps, completed=step, left="")
            self._bar.start()

    def on_train_batch_start(self, *, step: int) -> None:
        """Show that the first step is compiling."""
        if step == self._first_step:
            self._announce("compiling the training step")

    def on_train_batch_end(self, *, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        """Advance the bar, or print a line if one is due."""
        if not fabric.is_global_zero:
            return
        is_first = self._first_step_end is None
        if is_first:
            self._first_step_end = self._clock()
        else:
            self._count(metrics)
        if self._bar is not None:
            self._move(step, metrics)
        elif self._is_line_due(step, metrics, is_first=is_first):
            fields = [f"step {step}/{self._num_steps}", *_fields(metrics).values()]
            left = self._seconds_left(step)
            self._print(" | ".join([*fields, *([f"{_clock_text(left)} left"] if left else [])]))

    def _is_line_due(self, step: int, metrics: Mapping[str, Any], *, is_first: bool) -> bool:
        """Tell whether to print a line: one that is due waits until the step's numbers are read."""
        self._is_late |= is_first or step % (self.every_n_steps or 1) == 0
        if not self._is_late or isinstance(metrics.get("loss"), Tensor):
            return False
        self._is_late = False
        return True

    def _count(self, metrics: Mapping[str, Any]) -> None:
        """Add a step to the averages; its seconds are the mean of those whose numbers came with it."""
        self._tokens += metrics.get("num_input_tokens", metrics.get("num_tokens", 0.0))
        self._num_unread += 1
        if "step_seconds" in metrics:
            self._seconds += metrics["step_seconds"] * self._num_unread
            self._num_unread = 0

    def on_validation_start(self, *, step: int) -> None:
        """Show that an evaluation runs while the bar stands still."""
        self._announce(
            f"evaluating after step {step}"
            if "validation" in self._captured
            else "compiling the evaluation"
        )

    def on_validation_end(self, *, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the validation loss, above the bar."""
        self._captured.add("validation")
        if not fabric.is_global_zero:
            return
        loss = self._losses[step] = metrics["val_loss"]
        more = "".join(
            f" | {write(metrics[name])}"
            for name, write in _OF_EVALUATIONS.items()
            if name in metrics
        )
        best = " | best so far" if len(self._losses) > 1 and loss == self._best()[1] else ""
        self._print(f"step {step}/{self._num_steps} | val_loss {loss:.4f}{more}{best}")
        self._announce("")

    def on_train_end(self, *, fabric: Fabric, step: int) -> None:
        """Remove the bar and print a summary."""
        self._stop()
        if fabric.is_global_zero and step > self._first_step:
            for line in self._summary(step):
                self._print(line)

    def on_exception(self) -> None:
        """Remove the bar, so that the error is readable."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _announce(self, what: str) -> None:
        """Show a text in place of the numbers."""
        if self._bar is not None:
            done = round(self._bar.tasks[self._task].completed)
            text = f"{done}/{self._num_steps} | {what}"
            self._bar.update(self._task, description=text, left="")

    def _move(self, step: int, metrics: Mapping[str, Any]) -> None:
        assert self._bar is not None
        left = self._seconds_left(step)
        left_text = "" if left is None or step == self._num_steps else f"· {_clock_text(left)} left"
        # Spinner, bar, elapsed time, and the spaces between columns.
        taken = 1 + _bar_width(self.console) + len(" 0:00:00 ") + len(left_text) + 4
        # The last numbers that were read: a live bar is not worth waiting for the device.
        self._known.update({k: v for k, v in metrics.items() if not isinstance(v, Tensor)})
        fields = {"step": f"{step}/{self._num_steps}", **_fields(self._known)}
        text = _fitting(fields, self.console.width - taken)
        self._bar.update(self._task, completed=step, description=text, left=left_text)

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _seconds_left(self, step: int) -> float | None:
        """Estimate from all steps but the first, which compiles."""
        num_timed = step - self._first_step - 1
        if num_timed < 1 or self._first_step_end is None:
            return None
        return (self._clock() - self._first_step_end) / num_timed * (self._num_steps - step)

    def _best(self) -> tuple[int, float]:
        return min(self._losses.items(), key=lambda item: item[1])

    def _summary(self, step: int) -> Iterator[str]:
        seconds = _clock_text(self._clock() - self._start)
        text = f"trained {step - self._first_step} steps in {seconds}"
        if self._seconds > 0 and self._tokens > 0:
            text += f" | {_short(self._tokens / self._seconds)} tok/s after the first step"
        yield text
        if self._losses:
            best_step, best = self._best()
            last = list(self._losses.values())[-1]
            yield f"val_loss {last:.4f} | best {best:.4f} after step {best_step}"


def _make_bar(console: Console) -> Progress:
    def column() -> Column:
        return Column(no_wrap=True)

    return Progress(
        SpinnerColumn(),
        # A fixed width, so that it does not jump when the text beside it changes.
        BarColumn(bar_width=_bar_width(console)),
        TextColumn("{task.description}", table_column=column(), markup=False),
        _ElapsedColumn("", table_column=column()),
        TextColumn("{task.fields[left]}", table_column=column()),
        console=console,
        transient=True,
    )


def _bar_width(console: Console) -> int:
    return max(console.width // _BAR_SHARE, 4)


class _ElapsedColumn(TextColumn):
    """Time since the bar was started, as short as possible."""

    def render(self, task: Any) -> Any:
        return type(super().render(task))(_clock_text(task.elapsed or 0.0))


def _fields(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Format the metrics that are known, the most important first; the speed is that of all input tokens, if known."""
    if "input_tokens_per_s" in metrics and "tokens_per_s" in metrics:
        metrics = {**metrics, "target_tokens_per_s": metrics["tokens_per_s"]}
        metrics["tokens_per_s"] = metrics["input_tokens_per_s"]
    formats: dict[str, Callable[[float], str]] = {
        "loss": lambda value: f"loss {value:.4f}",
        "reward_accuracy": lambda value: f"accuracy {value:.1%}",
        "reward_margin": lambda value: f"margin {value:.3f}",
        "tokens_per_s": lambda value: f"{_short(value)} tok/s",
        "lr": lambda value: f"lr {value:.1e}",
        "mfu": lambda value: f"MFU {value:.1%}",
        "peak_allocated_gib": lambda value: f"{value:.1f} GiB",
        "process_peak_rss_gib": lambda value: f"RSS {value:.1f} GiB",
        "grad_norm": lambda value: f"grad norm {value:.3g}",
        "target_tokens_per_s": lambda value: f"{_short(value)} target tok/s",
    }
    return {key: write(metrics[key]) for key, write in formats.items() if key in metrics}


def _fitting(fields: Mapping[str, str], width: int) -> str:
    """Join the first fields that fit."""
    text = ""
    for field in fields.values():
        longer = f"{text} | {field}" if text else field
        if len(longer) > width:
            break
        text = longer
    return text


def _short(value: float) -> str:
    """Format a number with about three digits: 812, 12.3k, 1.23M."""
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
