"""Quantises a weight to NF4 with double quantisation, and dequantises it.

Both take some groups at a time, so that what they hold beside the weight and its bytes is at most 64 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thunder_memsave.stored_weights.format import refuse_non_finite
from thunder_memsave.stored_weights.nf4 import tables
from thunder_memsave.stored_weights.nf4.layout import (
    BLOCK,
    GROUP,
    SCALES,
    groups_of,
    num_bytes,
    offset_of,
    spans,
)

_GROUPS_AT_ONCE = 256
_SMALLEST = 1e-38
"""Scales below it count as it where numbers are divided by them."""


@torch.no_grad()
def quantize(weight: Tensor, *, name: str) -> Tensor:
    """Return the bytes of a weight in NF4.

    Args:
        weight: float32, bfloat16 or float16, any shape with at least one element.
        name: Its name, for the message.

    Returns:
        uint8, shape `[num_bytes(n)]` (`layout.py`), on the weight's device.

    Raises:
        NonFiniteWeightError: An element is infinite or not a number.
    """
    flat = weight.detach().reshape(-1)
    absmax = _absmax(flat)
    refuse_non_finite(absmax, name=name, title="NF4", shared_by=f"blocks of {BLOCK}")
    stored = torch.zeros(num_bytes(flat.numel()), dtype=torch.uint8, device=flat.device)
    offset = _mean(absmax)
    offset_of(stored).copy_(offset)
    for first, last in spans(flat.numel(), num_groups=_GROUPS_AT_ONCE):
        groups = groups_of(stored, flat.numel(), first=first, last=last)
        scales = absmax[first * SCALES : last * SCALES]
        _quantize_scales(scales - offset, groups.scale, groups.scales)
        values = flat[first * GROUP : last * GROUP].float()
        groups.numbers.copy_(_packed(values, scales).view_as(groups.numbers))
    return stored


@torch.no_grad()
def dequantize(stored: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the weight of these bytes.

    Args:
        stored: uint8, shape `[num_bytes(n)]` or longer, contiguous.
        shape: The weight's, with n elements.
        dtype: The result's: each element is a float32 product, rounded to it.
    """
    result = torch.empty(shape, dtype=dtype, device=stored.device)
    flat = result.view(-1)
    for first, last in spans(flat.numel(), num_groups=_GROUPS_AT_ONCE):
        groups = groups_of(stored, flat.numel(), first=first, last=last)
        codes = groups.scales.reshape(-1).to(torch.int32)
        scales = tables.scale_numbers(stored).index_select(0, codes).view_as(groups.scales)
        scales = scales.mul_(groups.scale[:, None]).add_(offset_of(stored)).view(-1)
        out = flat[first * GROUP : last * GROUP]
        codes = groups.numbers.reshape(-1).to(torch.int32)
        values = tables.pairs(stored).index_select(0, codes).view(-1)[: out.numel()]
        whole = values.numel() // BLOCK * BLOCK
        values[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
        if whole < values.numel():
            values[whole:].mul_(scales[-1])
        out.copy_(values)
    return result


def _absmax(flat: Tensor) -> Tensor:
    """Return the largest magnitude of each block: float32; NaN where it has one."""
    whole = flat.numel() // BLOCK * BLOCK
    found = torch.empty(-(-flat.numel() // BLOCK), device=flat.device)
    if whole:
        found[: whole // BLOCK] = flat[:whole].view(-1, BLOCK).abs().amax(dim=1)
    if whole < flat.numel():
        # The source keeps a last block that is not whole from having the scale 0, and only that one.
        found[-1] = flat[whole:].abs().amax().float().clamp(min=_SMALLEST)
    return found


def _mean(absmax: Tensor) -> Tensor:
    """Return the mean, by one thread: with more, its last bits would depend on how many a rank has."""
    with _one_thread():
        return absmax.mean()


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _quantize_scales(shifted: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Write the scale of the scales of each group, and their codes.

    Args:
        shifted: Scales of blocks less the offset: float32, shape `[groups * blocks]`.
        scale: float32, shape `[groups]`.
        codes: uint8, shape `[groups, blocks]`.
    """
    shifted = shifted.view_as(codes)
    largest = shifted.abs().amax(dim=1)
    scale.copy_(largest)
    normed = (shifted * largest.reciprocal()[:, None]).clamp_(-1, 1)
    # 0 * inf where all scales are the mean: the source gives these the code 0.
    steps = ((normed + 1.0) * 0.5 * (tables.STEPS - 1) + 0.5).nan_to_num_(0.0).to(torch.int32)
    found = tables.scale_codes(codes).index_select(0, steps.view(-1)).view_as(codes)
    codes.copy_(found.masked_fill_((largest == 0)[:, None], 0))


def _packed(values: Tensor, scales: Tensor) -> Tensor:
    """Return the codes of the nearest numbers, two in each byte: uint8."""
    whole = values.numel() // BLOCK * BLOCK
    inverse = 1.0 / scales[: whole // BLOCK].clamp(min=_SMALLEST)
    normed = torch.empty_like(values)
    torch.mul(values[:whole].view(-1, BLOCK), inverse[:, None], out=normed[:whole].view(-1, BLOCK))
    if whole < values.numel():
        normed[whole:] = values[whole:] / scales[-1]
    middles = (tables.numbers(values)[:-1] + tables.numbers(values)[1:]) / 2
    codes = torch.bucketize(normed.clamp_(-1, 1), middles, out_int32=True).to(torch.uint8)
    if codes.numel() % 2:
        # The source pads with the number 0.
        codes = torch.nn.functional.pad(codes, (0, 1), value=tables.NF4.index(0.0))
    return (codes[::2] << 4) | codes[1::2]
