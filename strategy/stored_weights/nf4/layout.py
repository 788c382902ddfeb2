"""The bytes of a weight in NF4: how many, and where its numbers and scales lie in them.

    offset, float32 | group | group | ... | last group, which may be shorter

A group is 16,384 elements in the order of the weight's rows, whatever their length: the float32 scale of its scales,
a byte for the scale of each block of 64 elements, then 4 bits for each element, the first of two in the high half. All
float32 numbers lie at multiples of 4 bytes. One flat tensor has it all, so that ranks gather a weight in one
collective, and no shape of a weight needs padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
"""Elements that share a scale."""
SCALES = 256
"""Scales that share a scale of their own."""
GROUP = BLOCK * SCALES
"""Elements of a group: 16,384."""

_OFFSET_BYTES = _SCALE_BYTES = 4
GROUP_BYTES = _SCALE_BYTES + SCALES + GROUP // 2


def num_bytes(num_elements: int) -> int:
    """Return the bytes of a weight: `n / 2 + n / 64 + 4 n / 16384`, each rounded up, and 4 for its offset."""
    halves, blocks, groups = (-(-num_elements // size) for size in (2, BLOCK, GROUP))
    return halves + blocks + _SCALE_BYTES * groups + _OFFSET_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Views of the numbers and scales of neighbouring groups of equal length."""

    scale: Tensor
    """float32, shape `[groups]`: of the scales of each group."""
    scales: Tensor
    """uint8, shape `[groups, blocks]`: codes of the scales of blocks, less the offset."""
    numbers: Tensor
    """uint8, shape `[groups, bytes]`: codes of two elements each."""


def offset_of(stored: Tensor) -> Tensor:
    """Return a view of the offset, the mean of all scales of blocks: float32, shape `[1]`."""
    return stored[:_OFFSET_BYTES].view(torch.float32)


def groups_of(stored: Tensor, num_elements: int, *, first: int, last: int) -> Groups:
    """Return views of the groups `[first, last)`.

    Args:
        stored: uint8, shape `[num_bytes(num_elements)]` or longer, contiguous.
        num_elements: Of the weight.
        first: Number of the first group.
        last: One more than that of the last; a group that is not whole has to be alone.
    """
    size = min(num_elements - first * GROUP, GROUP)
    assert size == GROUP or last == first + 1
    num_scales, num_halves = -(-size // BLOCK), -(-size // 2)
    begin = _OFFSET_BYTES + first * GROUP_BYTES
    width = _SCALE_BYTES + num_scales + num_halves
    rows = stored[begin : begin + (last - first) * width].view(last - first, width)
    scale, scales, numbers = rows.split([_SCALE_BYTES, num_scales, num_halves], dim=1)
    # The length of one group may be no multiple of 4 bytes, which torch asks of strides.
    of_groups = (
        scale[0].view(torch.float32) if last == first + 1 else scale.view(torch.float32)[:, 0]
    )
    return Groups(scale=of_groups, scales=scales, numbers=numbers)


def spans(num_elements: int, *, num_groups: int) -> list[tuple[int, int]]:
    """Return the groups `[first, last)` of a weight in turns of at most `num_groups` whole ones, or one that is not."""
    whole = num_elements // GROUP
    found = [(i, min(i + num_groups, whole)) for i in range(0, whole, num_groups)]
    return found if num_elements % GROUP == 0 else [*found, (whole, whole + 1)]
