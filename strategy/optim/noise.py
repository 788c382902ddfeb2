"""Random bits that are computed: the same for an element on any number of ranks, and after any resume.

A hash of seed, step, weight and state gives two keys; each element hashes its row and its column with them. Nothing is
stored, and no generator of PyTorch is used. Source of the hash: Wellons, Prospecting for Hash Functions, `lowbias32`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_FACTORS = (0x7FEB352D, 0x846CA68B)
_GOLDEN = 0x9E3779B9


def key_of(*numbers: int) -> int:
    """Hash whole numbers to one of 32 bits."""
    key = 0
    for number in numbers:
        for part in (number & _MASK, number >> 32 & _MASK):
            key = _mixed_number((key ^ part) + _GOLDEN & _MASK)
    return key


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


def uniform(values: Tensor, *, key: int, first_row: int) -> Tensor:
    """Return a random number from 0 to 1, without 1, for each element of these rows: float32."""
    bits = random_bits(values.shape, key=key, first_row=first_row, device=values.device)
    return bits.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def random_bits(shape: torch.Size, *, key: int, first_row: int, device: torch.device) -> Tensor:
    """Return 32 random bits for each element of these rows: int32."""
    num_columns = shape[1:].numel()
    rows = torch.arange(first_row, first_row + shape[0], dtype=torch.int32, device=device)
    columns = torch.arange(num_columns, dtype=torch.int32, device=device)
    rows = _mixed(_plus(rows, key))
    found = torch.add(rows.unsqueeze(1), columns.mul_(_as_int32(_GOLDEN)))
    return _mixed(found).view(shape)


def _mixed(x: Tensor) -> Tensor:
    """Hash each element, in place; products and sums of int32 wrap."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        _xor_shifted(x, shift).mul_(_as_int32(factor))
    return _xor_shifted(x, 16)


def _xor_shifted(x: Tensor, shift: int) -> Tensor:
    # The shift of int32 copies the sign.
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1))


def _plus(x: Tensor, number: int) -> Tensor:
    return x.add_(_as_int32(number))


def _mixed_number(x: int) -> int:
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        x = (x ^ x >> shift) * factor & _MASK
    return x ^ x >> 16


def _as_int32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
