"""Fabric's calls of a step whose weights backward updates (`optim/in_backward.py`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from contextlib import suppress

import torch
from lightning.fabric.plugins import Precision
from torch import Tensor
from torch.optim import Optimizer

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fabric.forward_module import ForwardModule
from thunder_memsave.fabric.nonfinite import refuse_scaler
from thunder_memsave.optim.in_backward import KEY, UpdatesInBackward
from thunder_memsave.settings.problems import ConfigError

_log = logging.getLogger(__name__)


def update_in_backward(
    optimizer: Optimizer,
    updates: UpdatesInBackward,
    precision: Precision,
    modules: Iterable[ForwardModule],
    *,
    is_asked: bool,
) -> None:
    """Let an optimizer update in backward from now on, or offer it to plans where neither a setting nor a plan asks.

    Raises:
        ConfigError: it cannot, or the precision has a gradient scaler, and it is asked for.
    """
    if not is_asked and not updates.is_on:
        with suppress(ConfigError):
            refuse_scaler(precision)
            updates.offer(optimizer)
        return
    refuse_scaler(precision)
    updates.add(optimizer)
    if any(c.backward_traces for module in modules for c in module.captures):
        _log.warning(
            "an optimizer was set up after the model's first call, whose backward does not know it: there %s has no "
            "effect, and optimizer.step() updates; set up the optimizer before.",
            KEY,
        )


def unclipped_norm(
    updates: UpdatesInBackward,
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    data_parallel: DataParallel | None,
) -> Tensor:
    """Return the norm of order 2 of an optimizer's gradients, which are not to be clipped. A collective.

    Raises:
        RuntimeError: they are to be clipped, another norm is asked for, or it is not finite.
    """
    if max_norm != math.inf or norm_type != 2:
        updates.refuse_clipping()
    norm = updates.norm(optimizer, data_parallel)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm is {norm.item()}, and with {KEY} the weights were updated by them: go back to a "
            "checkpoint, or pass error_if_nonfinite=False to go on."
        )
    return norm
