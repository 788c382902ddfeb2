"""PyTorch's shape rule of `nll_loss` refuses targets of uint8, which its kernels take.

Without numbers, the loss and its derivative run as Python (torch/_decomp/decompositions.py), where `gather` and
`scatter` want int64, so that a `cross_entropy` of such targets is not captured. Losses of images (N, C, H, W) take
int64 alone in eager too, and stay as they are.

Delete this file when `tests/compat/test_byte_targets.py` says that PyTorch's rule takes them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._decomp import decompositions

_forward = decompositions._nll_loss_forward
_backward = decompositions._nll_loss_backward


def apply() -> None:
    """Let the rules read such targets as int64."""
    decompositions._nll_loss_forward = forward  # type: ignore[assignment]
    decompositions._nll_loss_backward = backward  # type: ignore[assignment]


def remove() -> None:
    """Give PyTorch its own rules back."""
    decompositions._nll_loss_forward = _forward
    decompositions._nll_loss_backward = _backward


def forward(
    value: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of `value` (N, C) or (C,) and the total weight; `target` is (N,) or ()."""
    return _forward(value, _as_kernels(value, target), weight, reduction, ignore_index)


# Derivatives in forward mode compile it by TorchScript, which reads the annotations and knows no `*args`.
def backward(
    grad: Tensor,
    value: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of `value`, with the loss's own in `grad`."""
    known = _as_kernels(value, target)
    return _backward(grad, value, known, weight, reduction, ignore_index, total_weight)


def _as_kernels(value: Tensor, target: Tensor) -> Tensor:
    takes_bytes = target.dtype == torch.uint8 and value.dim() <= 2
    return target.long() if takes_bytes else target
