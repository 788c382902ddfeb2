"""Adds the norm of a step's gradients to its metrics."""

from __future__ import annotations

import math
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer


class GradientNormMonitor:
    """Metric `grad_norm`, for loops that do not clip and so do not have it.

    The loop calls `on_before_optimizer_step(fabric, model, optimizer)` on all ranks, after the last
    backward of the step. It is the norm over all ranks' gradients, however they are sharded.
    """

    metric_names = ("grad_norm",)

    def __init__(self) -> None:
        self._norm: Tensor | None = None

    def on_before_optimizer_step(
        self, *, fabric: Fabric, model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Measure the norm. A collective."""
        norm = fabric.clip_gradients(model, optimizer, max_norm=math.inf, error_if_nonfinite=False)
        assert isinstance(norm, Tensor)
        self._norm = norm

    def on_train_batch_end(self, *, metrics: dict[str, Any]) -> None:
        """Add the metric of the step."""
        if self._norm is not None:
            metrics["grad_norm"] = float(self._norm)  # not before: the host waits for it
            self._norm = None
