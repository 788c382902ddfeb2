"""Quantises a weight to MXFP4, numbers of 4 bits with a power of two for each block of 32, and dequantises it.

    row 0: scales, a byte for each block | codes of two elements in each byte, the first in the low half | row 1: ...

A block is 32 elements along the inputs of a product. A weight is `[out, in]`, or a stack of these, `[stack, out, in]`,
whose row is one matrix, such as an expert's. A transposed stack is `[stack, in, out]`, with the bytes of the other.

A number is `+-(0, 0.5, 1, 1.5, 2, 3, 4 or 6) * 2 ** (scale - 127)`. The scale of a block is `floor(log2(m)) - 2 + 127`
for its largest magnitude m, at least 0, so that m comes to lie in [4, 8). Elements are rounded to the nearest number,
of two to the one with an even code, and those beyond 6 become 6. A block of zeros has the scale 0. Both functions take
some rows at a time, so that what they hold beside the weight and its bytes is at most 64 MiB, or some copies of one
row of a matrix.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023, 5.3.3 (E2M1), 5.4.1 (E8M0) and 6.3 (conversion). The
scale 255, which is there no number, dequantises to that of `2 ** 128`, as in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thunder_memsave.aten.constant_tables import on_device_of
from thunder_memsave.stored_weights.format import refuse_non_finite

BLOCK = 32
"""Elements that share a scale."""
BLOCK_BYTES = BLOCK // 2
NOT_A_NUMBER = 255
"""The scale that the specification keeps for blocks without a value."""

_BIAS = 127
_LARGEST_EXPONENT = 2
"""That of 6, the largest number: 1.5 * 2 ** 2."""
_ELEMENTS_AT_ONCE = 4 * 2**20
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stored_shape(shape: torch.Size) -> torch.Size:
    """Return `[rows, bytes of a row]` of a weight `[rows, ...]`."""
    num_blocks = shape[1:].numel() // BLOCK
    return torch.Size([shape[0], num_blocks * (1 + BLOCK_BYTES)])


@torch.no_grad()
def quantize(weight: Tensor, *, name: str) -> Tensor:
    """Return the bytes of a weight, or of some of its rows, in MXFP4.

    Args:
        weight: float32, bfloat16 or float16, shape `[out, in]` or `[stack, out, in]`; `in` is a multiple of 32.
        name: Its name, for the message.

    Returns:
        uint8, shape `[rows, bytes of a row]`, on the weight's device.

    Raises:
        NonFiniteWeightError: An element is infinite or not a number.
    """
    stored = torch.empty(stored_shape(weight.shape), dtype=torch.uint8, device=weight.device)
    matrices = _as_matrices(weight.detach())
    scales, codes = split(stored, matrices.shape)
    for rows, outs in _turns(matrices):
        blocks = matrices[rows, outs].contiguous().float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(dim=-1)
        refuse_non_finite(largest, name=name, title="MXFP4", shared_by=f"blocks of {BLOCK}")
        exponents = _exponents(largest)
        scales[rows, outs] = (exponents + _BIAS).to(torch.uint8)
        codes[rows, outs] = _packed(torch.ldexp(blocks, -exponents[..., None]))
    return stored


def quantize_transposed(weight: Tensor, *, name: str) -> Tensor:
    """Return the bytes of a stack `[stack, in, out]`: those of its matrices transposed."""
    return quantize(weight.transpose(1, 2), name=name)


@torch.no_grad()
def dequantize(stored: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the weight of these bytes.

    Args:
        stored: uint8, shape `[rows, bytes of a row]`.
        shape: The weight's: `[out, in]` or `[stack, out, in]`.
        dtype: The result's; bfloat16 and float32 have all numbers exactly.
    """
    result = torch.empty(shape, dtype=dtype, device=stored.device)
    _fill(_as_matrices(result), stored)
    return result


@torch.no_grad()
def dequantize_transposed(
    stored: Tensor, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return the stack `[stack, in, out]` of these bytes, contiguous."""
    result = torch.empty(shape, dtype=dtype, device=stored.device)
    _fill(result.transpose(1, 2), stored)
    return result


def split(stored: Tensor, matrices: torch.Size) -> tuple[Tensor, Tensor]:
    """Return views of the scales, `[rows, out, blocks]`, and of the codes, `[rows, out, blocks, 16]`.

    Args:
        stored: uint8, shape `[rows, bytes of a row]`.
        matrices: `[rows, out, in]`.
    """
    num_outs, num_blocks = matrices[1], matrices[2] // BLOCK
    scales, codes = stored.tensor_split([num_outs * num_blocks], dim=1)
    size = (num_outs, num_blocks, BLOCK_BYTES)
    return scales.unflatten(1, size[:2]), codes.unflatten(1, size)


def _as_matrices(weight: Tensor) -> Tensor:
    """Return a view `[rows, out, in]`: a row of one matrix is one of its outputs."""
    return weight if weight.dim() == 3 else weight[:, None]


def _turns(matrices: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield some rows after the other, or some outputs of one row."""
    num_rows, num_outs, width = matrices.shape
    outs_at_once = max(min(num_outs, _ELEMENTS_AT_ONCE // max(width, 1)), 1)
    rows_at_once = max(_ELEMENTS_AT_ONCE // max(num_outs * width, 1), 1)
    for row in range(0, num_rows, rows_at_once):
        for out in range(0, num_outs, outs_at_once):
            yield slice(row, row + rows_at_once), slice(out, out + outs_at_once)


def _exponents(largest: Tensor) -> Tensor:
    """Return `floor(log2(largest)) - 2`, at least -127: int32."""
    _, exponents = torch.frexp(largest)  # largest = [0.5, 1) * 2 ** exponent; of 0 it is 0
    exponents = (exponents - 1 - _LARGEST_EXPONENT).clamp_(min=-_BIAS)
    return exponents.masked_fill_(largest == 0, -_BIAS)


def _packed(values: Tensor) -> Tensor:
    """Return the codes of the nearest numbers, two in each byte: uint8, `[..., 16]` of `[..., 32]`; changes it."""
    signs = torch.signbit(values).to(torch.uint8) << 3
    found = torch.bucketize(values.abs_(), on_device_of(values, _MIDDLES), out_int32=True)
    codes = found.to(torch.uint8) | signs
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def _fill(matrices: Tensor, stored: Tensor) -> None:
    """Write the numbers of these bytes into a view `[rows, out, in]`.

    A number times two and half its scale are those of bfloat16, and so is their product, where it is not infinite.
    """
    scales, codes = split(stored, matrices.shape)
    pairs, powers = on_device_of(stored, _PAIRS), on_device_of(stored, _POWERS)
    for rows, outs in _turns(matrices):
        some, of_blocks = codes[rows, outs], scales[rows, outs]
        values = pairs.index_select(0, some.flatten().to(torch.int32)).view(*of_blocks.shape, BLOCK)
        factors = powers.index_select(0, of_blocks.flatten().to(torch.int32))
        values.mul_(factors.view(*of_blocks.shape, 1))
        matrices[rows, outs].copy_(values.flatten(-2))


def _middles() -> Tensor:
    """Return the largest magnitudes that are rounded down to each number but the last."""
    numbers = torch.tensor(_NUMBERS, device="cpu", dtype=torch.float32)
    middles = (numbers[:-1] + numbers[1:]) / 2
    # Half-way between an odd code and the even one above it, a number is rounded up.
    middles[1::2] = middles[1::2].nextafter(torch.zeros((), device="cpu"))
    return middles


def _pairs() -> Tensor:
    """Return twice the two numbers that each byte stands for."""
    numbers = 2 * torch.tensor(_NUMBERS, device="cpu", dtype=torch.float32)
    numbers = torch.cat([numbers, -numbers]).bfloat16()
    byte = torch.arange(256, device="cpu")
    return torch.stack([numbers[byte & 15], numbers[byte >> 4]], dim=1)


def _powers() -> Tensor:
    """Return half the power of two that each scale stands for."""
    powers = [2.0 ** (scale - _BIAS - 1) for scale in range(256)]
    return torch.tensor(powers, device="cpu", dtype=torch.float64).bfloat16()


# Made now: a plan may read them first, on tensors without numbers.
_MIDDLES, _PAIRS, _POWERS = _middles(), _pairs(), _powers()
