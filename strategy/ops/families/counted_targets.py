"""Targets whose number of kept ones the caller knows, so that a loss in tiles need not ask the device for it."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("thunder_memsave::counted_targets", mutates_args=())
def counted_targets(targets: Tensor, num_kept: Tensor) -> Tensor:
    """Return a copy of targets, and let the cross-entropy that reads it know how many of them are not ignored.

    A linear layer and the cross-entropy of its results, compiled as one operation, compute no more tokens than that.
    Any other reader has the copy. A count that is too small is an error on the device, a larger one costs time.

    Args:
        targets: int64 of any shape.
        num_kept: int64 scalar on the CPU: the number of targets that are not ignored.
    """
    return targets.clone()


@counted_targets.register_fake
def _(targets: Tensor, num_kept: Tensor) -> Tensor:
    return torch.empty_like(targets)


COUNTED_TARGETS = torch.ops.thunder_memsave.counted_targets.default
