"""Ends a training when its validation metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from thunder_memsave.callbacks.control import TrainingControl


class EarlyStopping:
    """Asks for the end after `patience` evaluations in a row without an improvement.

    Its state is part of checkpoints, so a resumed run ends at the same step.

    Args:
        monitor: Name of a metric of `on_validation_end`.
        patience: Evaluations without an improvement before the end.
        min_delta: Changes up to this do not count as an improvement.
        mode: Whether smaller or larger values are better.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        monitor: str = "val_loss",
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        if patience < 1:
            raise ValueError(f"patience is {patience}, but must be at least 1 evaluation.")
        if min_delta < 0:
            raise ValueError(f"min_delta is {min_delta}, but must not be negative.")
        if mode not in ("min", "max"):
            raise ValueError(f"mode is {mode!r}, but must be 'min' or 'max'.")
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.mode = mode
        self.best: float | None = None
        self.num_waited = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the evaluations since."""
        return {"best": self.best, "num_waited": self.num_waited}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        self.best, self.num_waited = state_dict["best"], state_dict["num_waited"]

    def on_train_start(self, *, control: TrainingControl) -> None:
        """Ask for the end again, in a run that resumes where it had ended."""
        self._stop_if_due(control)

    def on_validation_end(self, *, metrics: Mapping[str, Any], control: TrainingControl) -> None:
        """Compare the metric with the best so far.

        Raises:
            ValueError: there is no such metric.
        """
        if self.monitor not in metrics:
            raise ValueError(
                f"EarlyStopping monitors {self.monitor!r}, but an evaluation gives "
                f"{sorted(metrics)}; monitor one of these."
            )
        value = float(metrics[self.monitor])
        if self._is_better(value):
            self.best, self.num_waited = value, 0
        else:
            self.num_waited += 1
        self._stop_if_due(control)

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def _stop_if_due(self, control: TrainingControl) -> None:
        if self.num_waited < self.patience:
            return
        best = "never a number" if self.best is None else f"{self.best:.4f}"
        control.stop(
            f"{self.monitor} has not improved in the last {self.num_waited} evaluations "
            f"(best: {best})"
        )
