"""BatchNorm with `momentum=None` cannot be captured: its forward takes a Python number from the count of batches.

The share of a batch in the statistics is `1.0 / float(self.num_batches_tracked)` (torch/nn/modules/batchnorm.py), and
`F.batch_norm` takes no tensor for it. While it is captured, the kernel gives the batch's own statistics instead, and
tensors average them. Results and gradients have eager's bits; running statistics are within a rounding of eager's, as
the kernel's mean is rounded before it is averaged. Nothing waits for the device.

Delete this file when `tests/compat/test_average_batch_norms.py` says that PyTorch's forward is captured whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

_upstream = _BatchNorm.forward


def upstream() -> Callable[..., Tensor]:
    """Return PyTorch's own `forward`."""
    return _upstream


def apply() -> None:
    """Average statistics by tensors, while such a module is captured."""

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:  # the name is PyTorch's
        if torch.compiler.is_compiling() and _averages(self):
            return _averaging(self, input)
        return _upstream(self, input)

    _BatchNorm.forward = forward  # type: ignore[method-assign]


def _averages(norm: _BatchNorm) -> bool:
    """Return whether a call updates statistics that are plain averages over all batches."""
    return (
        norm.momentum is None
        and norm.training
        and norm.track_running_stats
        and norm.num_batches_tracked is not None
        and norm.running_mean is not None
        and norm.running_var is not None
    )


def _averaging(norm: _BatchNorm, value: Tensor) -> Tensor:
    """Return the normed (N, C, ...), and update the statistics (C,) and the count."""
    norm._check_input_dim(value)
    count: Any = norm.num_batches_tracked
    mean: Any = norm.running_mean
    var: Any = norm.running_var
    count.add_(1)
    of_batch = (mean.clone(), var.clone())
    # With a share of 1.0 the kernel leaves the batch's statistics, the variance unbiased, in what it is given.
    result = F.batch_norm(value, *of_batch, norm.weight, norm.bias, True, 1.0, norm.eps)
    share = count.double().reciprocal()
    for running, new in zip((mean, var), of_batch, strict=True):
        running.copy_(share * new.double() + (1.0 - share) * running.double())
    return result
