"""The learning rate as a function of the step, without state to save."""

from __future__ import annotations

import math
from typing import Literal

from torch.optim import Optimizer

from thunder_memsave.finetune.run_file.config import LRSchedulerConfig

_DEFAULT_MIN_LR_RATIO = 0.1


def num_warmup_steps(config: LRSchedulerConfig, num_steps: int) -> int:
    """Convert a fraction of the run into steps; integers are steps already."""
    if isinstance(config.warmup_steps, float) and config.warmup_steps < 1:
        return round(config.warmup_steps * num_steps)
    return int(config.warmup_steps)


def lr_factor(config: LRSchedulerConfig, *, step: int, num_steps: int) -> float:
    """Return the factor on the optimizer's own learning rate for one step, counted from 0.

    Linear warmup reaches 1 with its last step; then half a cosine, or a line, reaches
    `min_lr_ratio` with the last step, or the factor stays 1.
    """
    warmup = num_warmup_steps(config, num_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    progress = min((step - warmup) / max(num_steps - 1 - warmup, 1), 1.0)
    lowest = _DEFAULT_MIN_LR_RATIO if config.min_lr_ratio is None else config.min_lr_ratio
    return lowest + (1 - lowest) * _remaining(config.name, progress)


def _remaining(name: Literal["cosine", "linear"], progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress)) if name == "cosine" else 1 - progress


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Scale the initial learning rate of each parameter group."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor
