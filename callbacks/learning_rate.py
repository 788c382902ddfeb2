"""Adds the learning rate of a step to its metrics."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class LearningRateMonitor:
    """Metric `lr`: the first parameter group's rate; further groups are `lr_1`, `lr_2`, ..."""

    metric_names = ("lr",)

    def on_train_batch_end(self, *, metrics: dict[str, Any], optimizer: Optimizer) -> None:
        """Add the learning rates that the step used."""
        for index, group in enumerate(optimizer.param_groups):
            metrics[f"lr_{index}" if index else "lr"] = float(group["lr"])
