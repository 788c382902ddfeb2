"""Stochastic rounding by random bits that are the same for an element on any number of ranks, and after any resume."""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_memsave.aten.random_bits import random_bits


def rounded_to_bfloat16(values: Tensor, *, key: int, first_row: int) -> Tensor:
    """Round stochastically: up or down with the probabilities that keep the mean.

    Args:
        values: float32, shape `[rows, ...]`, contiguous; overwritten.
        key: Differs from tensor to tensor and from step to step.
        first_row: Number of the first row in the whole, unsharded tensor.

    Returns:
        bfloat16, of the same shape.
    """
    bits = values.view(torch.int32)
    noise = random_bits(values.shape, key=key, first_row=first_row, device=values.device)
    # The bits that bfloat16 lacks are a fraction of its step; a random one below 1 carries over with that probability.
    bits.add_(noise.bitwise_and_(0xFFFF)).bitwise_and_(-0x10000)
    return values.bfloat16()
