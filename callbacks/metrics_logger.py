"""Passes metrics to Fabric's loggers, such as TensorBoard's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor


class MetricsLogger:
    """Logs every step's and evaluation's metrics to all of `Fabric(loggers=...)`, on rank 0.

    Args:
        hyperparameters: Logged once at the start, if the logger supports it.
        every_n_steps: Steps between two that are logged; evaluations always are.
    """

    def __init__(
        self, hyperparameters: Mapping[str, Any] | None = None, *, every_n_steps: int = 1
    ) -> None:
        self.hyperparameters = hyperparameters
        self.every_n_steps = every_n_steps

    def on_train_start(self, *, fabric: Fabric) -> None:
        """Log the hyperparameters."""
        if fabric.is_global_zero and self.hyperparameters is not None:
            for logger in fabric.loggers:
                with suppress(NotImplementedError):  # Fabric's own CSV logger cannot log them
                    logger.log_hyperparams(dict(self.hyperparameters))

    def on_validation_end(self, *, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        """Log an evaluation."""
        self._log(fabric, step, metrics)

    def on_train_batch_end(self, *, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        """Log a step if it is due."""
        if step % self.every_n_steps == 0:
            self._log(fabric, step, metrics)

    def on_train_end(self, *, fabric: Fabric) -> None:
        """Flush the loggers."""
        self._finalize(fabric, "success")

    def on_exception(self, *, fabric: Fabric) -> None:
        """Flush the loggers."""
        self._finalize(fabric, "failed")

    def _log(self, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        if fabric.is_global_zero:
            numbers = {k: float(v) if isinstance(v, Tensor) else v for k, v in metrics.items()}
            fabric.log_dict(numbers, step=step)

    def _finalize(self, fabric: Fabric, status: str) -> None:
        if fabric.is_global_zero:
            for logger in fabric.loggers:
                logger.finalize(status)
