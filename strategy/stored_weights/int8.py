"""Quantises a weight to int8 with one scale for each row, and dequantises it.

    row 0: scale, float32 | numbers, int8 | row 1: scale | numbers | ...

The scale of a row is its largest magnitude / 127, and a number is the nearest of an element / the scale, the even one
of two. A row of zeros has the scale 0. Both functions take some rows at a time, so that what they hold beside the
weight and its bytes is at most 64 MiB, or some copies of one row in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thunder_memsave.stored_weights.format import refuse_non_finite

SCALE_BYTES = 4
LARGEST = 127

_ELEMENTS_AT_ONCE = 4 * 2**20


def stored_shape(shape: torch.Size) -> torch.Size:
    """Return `[rows, columns + 4]`; a weight of another number of dims than 2 counts as rows of dim 0."""
    return torch.Size([shape[0], shape[1:].numel() + SCALE_BYTES])


@torch.no_grad()
def quantize(weight: Tensor, *, name: str) -> Tensor:
    """Return the bytes of a weight, or of some of its rows, in int8.

    Args:
        weight: float32, bfloat16 or float16, shape `[rows, ...]`.
        name: Its name, for the message.

    Returns:
        uint8, shape `[rows, columns + 4]`, on the weight's device.

    Raises:
        NonFiniteWeightError: An element is infinite or not a number.
    """
    rows = weight.detach().flatten(1)
    stored = torch.empty(stored_shape(weight.shape), dtype=torch.uint8, device=weight.device)
    largest = rows.abs().amax(dim=1, keepdim=True).float()
    refuse_non_finite(largest, name=name, title="int8", shared_by="rows")
    scales = largest / LARGEST
    stored[:, :SCALE_BYTES] = scales.view(torch.uint8)
    for some in _turns(rows):
        numbers = (rows[some] / scales[some]).round_().clamp_(-LARGEST, LARGEST)
        # A scale of 0: the row has zeros, or numbers so small that their scale is not even denormal.
        numbers.masked_fill_(scales[some] == 0, 0)
        stored[some, SCALE_BYTES:].view(torch.int8).copy_(numbers)
    return stored


@torch.no_grad()
def dequantize(stored: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the weight of these bytes.

    Args:
        stored: uint8, shape `[rows, columns + 4]`.
        shape: The weight's: `[rows, ...]`.
        dtype: The result's: each element is a float32 product, rounded to it.
    """
    result = torch.empty(shape, dtype=dtype, device=stored.device)
    rows = result.flatten(1)
    # A copy: a row's length may be no multiple of 4 bytes, which torch asks of strides and offsets.
    scales = stored[:, :SCALE_BYTES].clone().view(torch.float32)
    for some in _turns(rows):
        numbers = stored[some, SCALE_BYTES:].view(torch.int8).float()
        rows[some].copy_(numbers.mul_(scales[some]))
    return result


def _turns(rows: Tensor) -> Iterator[slice]:
    """Yield some rows after the other."""
    size = max(_ELEMENTS_AT_ONCE // max(rows.shape[1], 1), 1)
    for first in range(0, rows.shape[0], size):
        yield slice(first, first + size)
