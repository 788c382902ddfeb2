"""Computes the gradients of one optimizer step and clips them, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.finetune.objectives.loss_in_model import TRAINING, call_inputs
from thunder_memsave.finetune.objectives.objective import Objective


def accumulate(
    fabric: Fabric,
    model: nn.Module,
    batches: Sequence[Any],
    objective: Objective[Any],
    *,
    weight: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Accumulate the gradients of the global batch's mean loss; return this rank's summed loss, and further sums.

    Args:
        fabric: Its ranks share the global batch.
        model: The result of `fabric.setup`, with the objective's loss in its model (`put_loss_in`).
        batches: This rank's micro-batches, on the device.
        objective: Makes the inputs of both from a batch.
        weight: The objective's weight over all ranks, on the device.
    """
    # The strategy averages gradients over the ranks, but a mean over all rows needs their sum.
    scale = fabric.world_size / weight
    total, sums = torch.zeros((), device=fabric.device), None
    for number, batch in enumerate(batches, start=1):
        is_last = number == len(batches)
        with fabric.no_backward_sync(model, enabled=not is_last):  # type: ignore[arg-type]
            made = getattr(model, TRAINING)(**call_inputs(objective, batch))
            loss, more = made if isinstance(made, tuple) else (made, None)
            fabric.backward(loss * scale)
        total += loss.detach()
        if more is not None:
            sums = more if sums is None else sums + more
    return total, sums


def clip(
    fabric: Fabric, model: nn.Module, optimizer: Optimizer, *, max_norm: float | None
) -> Tensor:
    """Clip the gradients and return their norm before, the same on all ranks, on the device."""
    norm = fabric.clip_gradients(
        model,
        optimizer,
        # The norm is needed without clipping too: weights that become infinite stay so.
        max_norm=math.inf if max_norm is None else max_norm,
        error_if_nonfinite=False,  # the caller knows the step
    )
    assert isinstance(norm, Tensor)
    return norm
