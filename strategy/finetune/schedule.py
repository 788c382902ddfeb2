"""The learning rate as a function of the step, so that there is no state to save."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from thunder_memsave.finetune.config import LRSchedulerConfig


def num_warmup_steps(config: LRSchedulerConfig, num_steps: int) -> int:
    """Turn a fraction of the run into steps; whole numbers are steps already."""
    if isinstance(config.warmup_steps, float) and config.warmup_steps < 1:
        return round(config.warmup_steps * num_steps)
    return int(config.warmup_steps)


def lr_factor(config: LRSchedulerConfig, *, step: int, num_steps: int) -> float:
    """Give the factor on the optimizer's own learning rate for one step, counted from 0.

    Linear warmup that reaches 1 with its last step, then half a cosine down to `min_lr_ratio`.
    """
    warmup = num_warmup_steps(config, num_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(num_steps - 1 - warmup, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    lowest = 0.1 if config.min_lr_ratio is None else config.min_lr_ratio
    return lowest + (1 - lowest) * cosine


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Scale the learning rate that each parameter group was made with."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * factor
