"""NVFP4 by PyTorch: blocks of 16 numbers of 4 bits (E2M1), each with a scale in E4M3, and one amax for the tensor.

A block of weights is 16x16. A number stands for itself times the scale of its block times amax / (6 * 448). The
arithmetic is that of TransformerEngine's Python, transformer_engine/pytorch/custom_recipes/reference_nvfp4.py, which
its kernels are tested against. As there, a NaN makes the amax NaN, and so every product of the tensor.

A cast by columns of inputs and gradients, for the product of a weight's gradient, is of the columns after a random
Hadamard transform of each 16 of their elements, which the product undoes: both of its operands are transformed.

Bytes are two numbers: the first one has the lower bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from thunder_memsave.aten.random_bits import key_of_seed, uniform
from thunder_memsave.aten.record import once_through_memory
from thunder_memsave.fp8.kernels.casting import cached
from thunder_memsave.fp8.kernels.mx_blocks import whole_blocks
from thunder_memsave.fp8.kernels.tiled_product import product_in_tiles

NVFP4_BLOCK = 16
"""Number of elements that share a scale, and side of a block of weights."""

BY_ROWS, BY_COLUMNS = 0, 1
"""Numbers of the casts of a gradient, each of which has random bits of its own."""

_E2M1_MAX, _E4M3_MAX = 6.0, 448.0
_FLOAT32_MAX = torch.finfo(torch.float32).max
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The random signs of the transform, which TransformerEngine drew once for all (`get_wgrad_sign_vector`)."""

Quantized = tuple[Tensor, Tensor, Tensor]
"""Numbers, uint8 `[rows, columns / 2]`; scales, e4m3 `[rows, columns / 16]`; amax, float32 `[1]`."""


def quantize_nvfp4(x: Tensor, block_rows: int, seed: Tensor | None) -> Quantized:
    """Cast each block with a scale of its own amax.

    Args:
        x: `[rows, columns]` in any float dtype; columns are a multiple of 32.
        block_rows: Rows of a block: 16 for weights, otherwise 1.
        seed: int64 `[1]`: of the random bits by which each number is rounded up or down, so that its mean stays; None:
            to the nearest.

    Returns:
        What `Quantized` says.
    """
    return _quantized(x, block_rows, None if seed is None else key_of_seed(seed, BY_ROWS))


def quantize_nvfp4_columns(x: Tensor, block_rows: int, seed: Tensor | None) -> Quantized:
    """Cast the transpose, whose rows end with zeros up to a multiple of 32; if blocks have one row, transformed.

    Args:
        x: `[rows, columns]`; bfloat16, if blocks have one row.
        block_rows: As in `quantize_nvfp4`.
        seed: As there; the random bits are others.

    Returns:
        What `Quantized` says, of `[columns, rows + zeros]`. Zeros change no sum.
    """
    missing = whole_blocks(x.shape[0]) - x.shape[0]
    columns = torch.nn.functional.pad(x.t(), (0, missing)) if missing else x.t().contiguous()
    if block_rows == 1:
        columns = _transformed(columns)
    return _quantized(columns, block_rows, None if seed is None else key_of_seed(seed, BY_COLUMNS))


def quantize_nvfp4_both(x: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `quantize_nvfp4` for blocks of one row, and then those of `quantize_nvfp4_columns`."""
    return *quantize_nvfp4(x, 1, None), *quantize_nvfp4_columns(x, 1, None)


def dequantize_nvfp4(q: Tensor, scales: Tensor, amax: Tensor) -> Tensor:
    """Dequantise to float32 `[rows, columns]`; columns that were transformed stay so."""
    return _without_amax(q, scales, slice(None)) * (amax / (_E2M1_MAX * _E4M3_MAX))


def gemm_nvfp4(
    a: Tensor,
    a_scales: Tensor,
    a_amax: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_amax: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
    drawn: Tensor | None = None,
) -> Tensor:
    """Multiply `a @ b.t() + bias`.

    Args:
        a: Numbers of `[m, k]`.
        a_scales: Their scales.
        a_amax: Their amax.
        b: Numbers of `[n, k]`.
        b_scales: Their scales.
        b_amax: Their amax.
        bias: `[n]` or None; added before the result is rounded.
        out_dtype: The result's dtype.
        use_fast_accum: No effect here: the product is in float32.
        drawn: A seed that is not read: a trace has the draw of it in forward, because forward's product takes it.

    Returns:
        `[m, n]`.
    """
    # Of both tensors at once, as in its kernel: the product of two amaxes may be infinite.
    factor = a_amax * b_amax / (_E2M1_MAX * _E2M1_MAX * _E4M3_MAX * _E4M3_MAX)
    left, right = partial(_without_amax, a, a_scales), partial(_without_amax, b, b_scales)
    shape = (a.shape[0], b.shape[0], 2 * a.shape[1])
    return product_in_tiles(left, right, shape, bias, out_dtype, factor=factor)


def _quantized(x: Tensor, block_rows: int, key: Tensor | None) -> Quantized:
    rows, columns = x.shape
    numbers = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    scales = x.new_empty((rows, columns // NVFP4_BLOCK), dtype=torch.float8_e4m3fn)
    with once_through_memory(x, x, numbers, scales):  # once for the amax
        amax = _amax(x)
        encode = _encode_scale(amax)
        for first, length in cached(x, rows, multiple=block_rows):
            part, place = x[first : first + length], slice(first, first + length)
            of_rows = _block_scales(part, encode, block_rows)
            scales[place] = of_rows
            factors = (of_rows.float() * encode.reciprocal()).reciprocal_().clamp_max_(_FLOAT32_MAX)
            blocks = part.float().unflatten(1, (-1, NVFP4_BLOCK))
            scaled = blocks.mul(factors[..., None]).flatten(1)
            random = None if key is None else uniform(scaled, key=key, first_row=first)
            numbers[place] = _packed(scaled, random)
    return numbers, scales, amax


def _amax(x: Tensor) -> Tensor:
    """Return the largest magnitude, NaN if there is one, float32 `[1]`."""
    largest = x.new_zeros(1, dtype=torch.float32)
    for first, length in cached(x, x.shape[0]):
        part = x[first : first + length]
        torch.maximum(largest, part.abs().amax().float(), out=largest)
    return largest


def _encode_scale(amax: Tensor) -> Tensor:
    """Return the factor that takes the amax to the largest number of a block times the largest scale."""
    # Not `number / tensor`, for which torch multiplies by the reciprocal, which rounds twice.
    scale = torch.full_like(amax, _E2M1_MAX * _E4M3_MAX).div_(amax).clamp_max_(_FLOAT32_MAX)
    return torch.where(scale == 0, 1.0, scale)  # of an infinite amax


def _block_scales(x: Tensor, encode: Tensor, block_rows: int) -> Tensor:
    """Return the scale of each row's blocks, e4m3."""
    blocks = x.abs().unflatten(0, (-1, block_rows)).unflatten(2, (-1, NVFP4_BLOCK))
    amax = blocks.amax((1, 3)).float().repeat_interleave(block_rows, dim=0)
    scales: Tensor = amax.mul_(encode * (1 / _E2M1_MAX)).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return scales.to(torch.float8_e4m3fn)


def _packed(scaled: Tensor, random: Tensor | None) -> Tensor:
    """Round to E2M1, whose steps are 1/2 below 2, 1 below 4, and 2 up to 6, and put two numbers into a byte.

    Args:
        scaled: float32 `[rows, columns]`.
        random: Numbers from 0 to 1, without 1, of the same shape: a magnitude is rounded up if its part of a step is
            larger; None: to the nearest, and to the even one of two.
    """
    magnitude = scaled.abs().clamp_max_(_E2M1_MAX)
    of_4, of_2 = magnitude >= 4, magnitude >= 2
    steps = magnitude * torch.where(of_4, 0.5, torch.where(of_2, 1.0, 2.0))
    if random is None:
        rounded = steps.round()
    else:
        rounded = steps.floor()
        rounded += random < steps - rounded
    # Two steps of 1 make 2, which is number 4, and two of 2 make 4, which is number 6.
    codes = rounded.add_(torch.where(of_4, 4.0, torch.where(of_2, 2.0, 0.0))).nan_to_num_(nan=0.0)
    bits = codes.to(torch.uint8) + (scaled < 0).to(torch.uint8) * 8
    return bits[:, 0::2] + bits[:, 1::2] * 16


def _without_amax(q: Tensor, scales: Tensor, rows: slice) -> Tensor:
    """Return rows of numbers times the scales of their blocks, float32."""
    part = q[rows]
    codes = torch.stack((part & 15, part >> 4), dim=2).flatten(1)
    steps = codes.bitwise_and(7).float()
    # The inverse of `_packed`: 0, 1/2, 1, 3/2, 2, 3, 4, 6.
    values = torch.where(steps < 4, steps / 2, torch.where(steps < 6, steps - 2, 2 * steps - 8))
    values = torch.where(codes >= 8, -values, values)
    blocks: Tensor = values.unflatten(1, (-1, NVFP4_BLOCK))
    return (blocks * scales[rows].float()[..., None]).flatten(1)


def _transformed(columns: Tensor) -> Tensor:
    """Multiply each 16 elements of a row by the Hadamard matrix with random signs, over 4; bfloat16."""
    matrix = torch.ones((1, 1), dtype=columns.dtype, device=columns.device)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    signs = torch.tensor(_SIGNS, dtype=columns.dtype, device=columns.device)
    return (columns.view(-1, NVFP4_BLOCK) @ (signs[:, None] * matrix / 4)).view(columns.shape)
