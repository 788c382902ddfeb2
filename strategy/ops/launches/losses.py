"""Losses of a tile's logits in one launch, and their gradients in place of the logits in another, by Triton.

A third multiplies gradients by the loss's own. PyTorch's operators make a copy in float32 and go through it five times;
they run (`families/tiled_loss.py`) where Triton does not, and for dtypes that need no copy.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_memsave.aten.record import once_through_memory
from thunder_memsave.ops.cuda_device import device_of, is_here
from thunder_memsave.ops.launches import available

_DTYPES = (torch.bfloat16, torch.float16)
_OF_ROW, _OF_ROW_WARPS = 8192, 16
"""Classes that a program reduces at a time, and its warps."""
_WRITTEN, _WRITTEN_WARPS = 4096, 8
"""Gradients that a program writes, and its warps."""


class Terms(NamedTuple):
    """Terms of the softmax of each row, (rows,) float32."""

    largest: Tensor
    logarithm: Tensor
    """The logarithm of the sum of exponentials of numbers less the largest."""
    total: Tensor | None
    """Sum of the numbers, where it was asked for."""


def applies(logits_like: Tensor, dtype: torch.dtype) -> bool:
    """Return whether losses of logits of a dtype, on the device of `logits_like`, are launched by Triton.

    Devices that are planned for and not here are taken to have Triton, which PyTorch's wheels for CUDA bring along.
    """
    if dtype not in _DTYPES or device_of(logits_like).type != "cuda":
        return False
    return not is_here() or why_not() is None


@cache
def why_not() -> str | None:
    """Return why Triton launches nothing on this machine's CUDA device; None: it does. The first call tries it."""

    def launch() -> None:
        terms_of(torch.zeros(1, 1, dtype=torch.bfloat16, device="cuda"))

    instead = "losses copy their logits to float32 and go through them five times, which takes longer than one kernel"
    return available.why_not(launch, instead=instead)


def terms_of(
    logits: Tensor, *, scale: float = 1.0, soft_cap: float | None = None, adds: bool = False
) -> Terms:
    """Return the terms of each row's softmax.

    Args:
        logits: (rows, classes), contiguous, bfloat16 or float16.
        scale: Factor of the logits.
        soft_cap: Logits are `soft_cap * tanh(scale * logits / soft_cap)`; None: not.
        adds: Whether the sum of a row's numbers is wanted too.
    """
    num_rows, num_classes = logits.shape
    largest, logarithm = (logits.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    total = torch.empty_like(largest) if adds else None
    with once_through_memory(logits):
        if available.has_numbers(logits) and num_rows:
            with torch.cuda.device_of(logits):
                _kernels().softmax_terms_kernel[(num_rows,)](
                    logits,
                    largest,
                    logarithm,
                    largest if total is None else total,
                    NUM_CLASSES=num_classes,
                    SCALE=scale,
                    CAP=soft_cap or 0.0,
                    ADDS=adds,
                    BLOCK=_OF_ROW,
                    num_warps=_OF_ROW_WARPS,
                )
    return Terms(largest, logarithm, total)


def write_gradients(
    logits: Tensor,
    targets: Tensor,
    factors: Tensor,
    terms: Terms,
    *,
    ignored: int,
    scale: float = 1.0,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> None:
    """Write gradients of a cross-entropy over its logits.

    Args:
        logits: (rows, classes), as `terms_of` had them.
        targets: (rows,), int64: classes, or `ignored`.
        factors: float32 of one element, or (rows,): what each row's loss is multiplied by.
        terms: What `terms_of` returned.
        ignored: Target of rows whose gradients are 0.
        scale: As `terms_of` had it.
        soft_cap: As `terms_of` had it.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        z_loss: Factor of the squared logarithm of the softmax's denominator.
    """
    num_rows, num_classes = logits.shape
    with once_through_memory(logits, logits):
        if available.has_numbers(logits) and logits.numel():
            with torch.cuda.device_of(logits):
                _kernels().gradients_kernel[(num_rows, -(-num_classes // _WRITTEN))](
                    logits,
                    targets,
                    factors,
                    factors.stride(0) if factors.ndim else 0,
                    terms.largest,
                    terms.logarithm,
                    NUM_CLASSES=num_classes,
                    IGNORED=ignored,
                    SCALE=scale,
                    CAP=soft_cap or 0.0,
                    SMOOTHING=label_smoothing,
                    Z_LOSS=z_loss,
                    BLOCK=_WRITTEN,
                    num_warps=_WRITTEN_WARPS,
                )


def scaled_rows(value: Tensor, factors: Tensor) -> Tensor:
    """Return `value * factors` in its dtype, computed in float32.

    Args:
        value: Contiguous, bfloat16 or float16.
        factors: float32 (1,), for all; or (rows,), one for each slice along the first dim.
    """
    result = torch.empty_like(value)
    with once_through_memory(value, result):
        if available.has_numbers(value) and value.numel():
            num_columns = value.numel() // factors.numel()
            blocks_of_row = -(-num_columns // _WRITTEN)
            with torch.cuda.device_of(value):
                _kernels().scale_rows_kernel[(factors.numel() * blocks_of_row,)](
                    value,
                    factors,
                    result,
                    num_columns,
                    BLOCKS_OF_ROW=blocks_of_row,
                    BLOCK=_WRITTEN,
                    num_warps=_WRITTEN_WARPS,
                )
    return result


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("thunder_memsave.ops.launches.loss_kernels")
