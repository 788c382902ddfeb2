"""The fp8 operations of a linear on plain tensors, by PyTorch: quantise, transpose, multiply.

The arithmetic is bit-identical to TransformerEngine's kernels, on the CPU too: a value is multiplied by its scale in
float32, saturates at the largest finite number of the fp8 dtype, and stays NaN if it was; the largest magnitude (amax)
includes infinities and ignores NaN (`fmaxf` in transformer_engine/common/cast/fp8/quantize_fp8.cuh).

Matrices are contiguous, with the contracted dim last. On CUDA, `one_launch` casts and transposes, in the same bits,
where it can; otherwise a cast runs in chunks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_memsave.aten.record import once_through_memory
from thunder_memsave.fp8.kernels import one_launch
from thunder_memsave.fp8.kernels.casting import cached, magnitudes, saturated
from thunder_memsave.fp8.kernels.cublas_gemm import cuda_gemm
from thunder_memsave.fp8.kernels.mx_blocks import (
    dequantize_mx,
    is_mx,
    quantize_mx,
    quantize_mx_both,
    quantize_mx_columns,
)
from thunder_memsave.fp8.kernels.nvfp4_blocks import (
    gemm_nvfp4,
    quantize_nvfp4,
    quantize_nvfp4_both,
    quantize_nvfp4_columns,
)
from thunder_memsave.fp8.kernels.tiled_product import product_in_tiles

__all__ = [  # with the functions here, what a backend has
    "gemm_nvfp4",
    "quantize_mx",
    "quantize_mx_both",
    "quantize_mx_columns",
    "quantize_nvfp4",
    "quantize_nvfp4_both",
    "quantize_nvfp4_columns",
]

BLOCK = 128
"""Side of a block, the only one that GEMMs on Hopper support."""


def quantize_delayed(
    x: Tensor, scale: Tensor, amax_history: Tensor, index: int, dtype: torch.dtype, records: bool
) -> tuple[Tensor, Tensor]:
    """Cast with a scale from earlier steps, and record the amax for later ones.

    Args:
        x: Any float dtype and shape.
        scale: float32 `[tensors]`, of the linear's tensors in this direction; `scale[index]` is used.
        amax_history: float32 `[length, tensors]`; its first row is the current step's.
        index: Index of `x` among the linear's tensors.
        dtype: The fp8 dtype.
        records: Whether `amax_history[0, index]` becomes the maximum of itself and x's amax, in place: the same however
            often, and in whatever order, the casts of a step run.

    Returns:
        x in fp8, and the inverse scale, float32 `[1]`, which shares no memory with the state.
    """
    chosen = scale[index : index + 1]
    newest = amax_history[0, index] if records else None
    if one_launch.applies(x):
        return one_launch.quantize_delayed(x, chosen, dtype, newest)
    return cast(x, chosen, dtype, raised=newest), chosen.reciprocal()


def quantize_current(
    x: Tensor, dtype: torch.dtype, amax_epsilon: float = 0.0, force_pow_2_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast with the scale of x's own amax.

    Args:
        x: Any float dtype and shape.
        dtype: The fp8 dtype.
        amax_epsilon: Lower bound of the amax.
        force_pow_2_scales: Whether scales are rounded down to powers of 2.

    Returns:
        x in fp8, and the inverse scale, float32 `[1]`.
    """
    if one_launch.applies(x):
        return one_launch.quantize_current(x, dtype, amax_epsilon, force_pow_2_scales)
    scale = current_scale(
        amax(x), dtype, amax_epsilon=amax_epsilon, force_pow_2_scales=force_pow_2_scales
    )
    return cast(x, scale, dtype), scale.reciprocal()


def weight_amax(x: Tensor) -> Tensor:
    """Return the amax of a weight's rows, float32 `[1]`, for `quantize_with_amax`."""
    return amax(x).reshape(1)


def quantize_with_amax(
    x: Tensor, amaxes: Tensor, index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cast rows of a weight with the scale of `quantize_current` for the whole.

    Args:
        x: Any float dtype and shape.
        amaxes: float32 `[n]`, the amax of each of several whole weights.
        index: That of the weight.
        dtype: The fp8 dtype.

    Returns:
        x in fp8, and the inverse scale, float32 `[1]`.
    """
    scale = current_scale(amaxes[index], dtype)
    if one_launch.applies(x):
        return one_launch.quantize_delayed(x, scale, dtype, None)
    return cast(x, scale, dtype), scale.reciprocal()


def current_scale(
    amax: Tensor, dtype: torch.dtype, amax_epsilon: float = 0.0, force_pow_2_scales: bool = False
) -> Tensor:
    """Return the scale of `quantize_current` for a tensor of this amax, float32 `[1]`."""
    return _scale_of(
        amax.reshape(1),
        dtype,
        amax_epsilon=amax_epsilon,
        force_pow_2_scales=force_pow_2_scales,
        instead_of_inf=torch.finfo(torch.float32).max,
    )


def quantize_block(
    x: Tensor,
    dtype: torch.dtype,
    block_rows: int,
    block_cols: int = BLOCK,
    amax_epsilon: float = 0.0,
    force_pow_2_scales: bool = True,
) -> tuple[Tensor, Tensor]:
    """Cast each block with the scale of its own amax.

    Args:
        x: `[rows, columns]` in any float dtype; the last blocks may be smaller than the others.
        dtype: The fp8 dtype.
        block_rows: 1 for inputs and gradients, 128 for weights.
        block_cols: 128.
        amax_epsilon: Lower bound of each amax.
        force_pow_2_scales: Whether scales are rounded down to powers of 2.

    Returns:
        x in fp8, and the inverse scales, float32 of shape `block_scales_shape`.
    """
    if one_launch.applies(x):
        return one_launch.quantize_block(
            x, dtype, block_rows, block_cols, amax_epsilon, force_pow_2_scales
        )
    quantized = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    shape = block_scales_shape(x.shape[0], x.shape[1], block_rows, block_cols)
    scales = x.new_empty(shape, dtype=torch.float32)
    with once_through_memory(x, quantized, scales):
        for first, rows in cached(x, x.shape[0], multiple=block_rows):
            part = x[first : first + rows]
            blocks = scales[first // block_rows :][: -(-rows // block_rows)]
            blocks.copy_(
                block_scales(
                    block_amax(part, block_rows, block_cols),
                    dtype,
                    of=x.dtype,
                    amax_epsilon=amax_epsilon,
                    force_pow_2_scales=force_pow_2_scales,
                )
            )
            quantized[first : first + rows] = cast_blocks(
                part, blocks, dtype, block_rows, block_cols
            )
    return quantized, scales.reciprocal_()


def block_scales(
    amax: Tensor,
    dtype: torch.dtype,
    *,
    of: torch.dtype,
    amax_epsilon: float = 0.0,
    force_pow_2_scales: bool = True,
) -> Tensor:
    """Return the scales of `quantize_block` for blocks of these amaxes, of a tensor of dtype `of`."""
    return _scale_of(
        amax,
        dtype,
        amax_epsilon=amax_epsilon,
        force_pow_2_scales=force_pow_2_scales,
        instead_of_inf=torch.finfo(of).max,
    )


def cast_blocks(
    x: Tensor, scales: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int = BLOCK
) -> Tensor:
    """Cast each block of `[rows, columns]` with its scale."""
    each = _of_elements(scales, x.shape[0], x.shape[1], block_rows, block_cols)
    return saturated(x * each, dtype).to(dtype)


def block_scales_shape(
    rows: int, columns: int, block_rows: int, block_cols: int = BLOCK
) -> tuple[int, int]:
    """Return the number of blocks down and across a matrix."""
    return -(-rows // block_rows), -(-columns // block_cols)


def transpose(q: Tensor) -> Tensor:
    """Copy `[rows, columns]` to `[columns, rows]`.

    For scales of the whole tensor; with scales of blocks, x.t() is quantised instead.
    """
    return one_launch.transpose(q) if one_launch.applies(q) else q.t().contiguous()


def gemm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """Multiply `a @ b.t() + bias`.

    Args:
        a: fp8 `[m, k]`.
        a_scale_inv: float32 `[1]`, or inverse scales of `quantize_block` or `quantize_mx`.
        b: fp8 `[n, k]`.
        b_scale_inv: As `a_scale_inv`.
        bias: `[n]` or None; added before the result is rounded to `out_dtype`, except to float32 on CUDA, where it is
            added to the result.
        out_dtype: The result's dtype.
        use_fast_accum: Whether Hopper's tensor cores may accumulate in fewer bits; no effect elsewhere.

    Returns:
        `[m, n]`.
    """
    bias = None if bias is None else bias.to(out_dtype)
    if a.is_cuda:
        return cuda_gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, use_fast_accum)
    if isinstance(a, FakeTensor):  # a plan, perhaps for a GPU that is not here: one product
        one = torch.empty(1, dtype=torch.float32, device=a.device)
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, bias=bias, out_dtype=out_dtype)
    return _dequantized_gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype)


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """Dequantise to float32.

    Args:
        q: fp8, of any shape; `[rows, columns]` with scales of blocks.
        scale_inv: float32 `[1]`, or inverse scales of `quantize_block` or `quantize_mx`.
    """
    if scale_inv.dim() < 2:
        return q.float() * scale_inv
    if is_mx(scale_inv):
        return dequantize_mx(q, scale_inv)
    rows, columns = q.shape
    # Blocks have 1 or BLOCK rows; with 1, there is a scale in each row.
    block_rows = 1 if scale_inv.shape[0] == rows else BLOCK
    return q.float() * _of_elements(scale_inv, rows, columns, block_rows, BLOCK)


def dequantize_rows(q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise rows that have one scale each, a power of 2, and round once, to finite numbers.

    Args:
        q: fp8 `[rows, columns]`, contiguous.
        scale_inv: float32 `[rows, 1]`.
        dtype: The result's: float32, bfloat16 or float16.
    """
    if one_launch.applies(q):
        return one_launch.dequantize_rows(q, scale_inv, dtype)
    result = torch.empty_like(q, dtype=dtype)
    with once_through_memory(q, scale_inv, result):
        for first, rows in cached(q, q.shape[0]):
            part = slice(first, first + rows)
            result[part] = saturated(q[part].float().mul_(scale_inv[part]), dtype)
    return result


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of the elements that are not NaN, 0-dim float32; 0 if there is none."""
    if one_launch.applies(x):
        return one_launch.amax(x)
    largest = x.new_zeros((), dtype=torch.float32)
    flat = x.reshape(-1)
    with once_through_memory(x):
        for first, length in cached(flat, flat.numel()):
            _raise(largest, flat[first : first + length])
    return largest


def _raise(amax: Tensor, part: Tensor) -> None:
    """Raise `amax` to at least the part's, in place."""
    amax.copy_(torch.maximum(amax, magnitudes(part).amax().float()))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, *, raised: Tensor | None = None) -> Tensor:
    """Cast with one scale, float32 `[1]`; values that are too large saturate.

    Args:
        x: Any float dtype and shape.
        scale: The factor that x is multiplied with.
        dtype: The fp8 dtype.
        raised: An amax to raise to at least x's, in the same pass over x.
    """
    if one_launch.applies(x):
        return one_launch.cast(x, scale, dtype, raised=raised)
    quantized = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    source, target = x.reshape(-1), quantized.view(-1)
    with once_through_memory(x, quantized):
        for first, length in cached(source, source.numel()):
            part = slice(first, first + length)
            if raised is not None:
                _raise(raised, source[part])
            target[part].copy_(saturated(source[part] * scale, dtype))
    return quantized


def _scale_of(
    amax: Tensor,
    dtype: torch.dtype,
    *,
    amax_epsilon: float,
    force_pow_2_scales: bool,
    instead_of_inf: float,
) -> Tensor:
    """Return the scale for an amax: `compute_scale_from_amax` in transformer_engine/common/recipe/recipe_common.cuh."""
    amax = amax.clamp_min(amax_epsilon)
    # Not `number / tensor`, for which torch multiplies by the reciprocal, which rounds twice.
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
    scale = torch.where(scale.isinf(), instead_of_inf, scale)
    if force_pow_2_scales:
        exponent = scale.view(torch.int32) & 0x7F800000  # without the mantissa
        scale = exponent.view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


def block_amax(x: Tensor, block_rows: int, block_cols: int) -> Tensor:
    """Return the amax of each block, float32."""
    rows, columns = x.shape
    down, across = block_scales_shape(rows, columns, block_rows, block_cols)
    padding = (0, across * block_cols - columns, 0, down * block_rows - rows)
    padded = torch.nn.functional.pad(magnitudes(x), padding)
    return padded.view(down, block_rows, across, block_cols).amax(dim=(1, 3)).float()


def _of_elements(
    scales: Tensor, rows: int, columns: int, block_rows: int, block_cols: int
) -> Tensor:
    """Spread the scales of blocks over their elements."""
    spread = scales.repeat_interleave(block_cols, dim=1)[:, :columns]
    return spread if block_rows == 1 else spread.repeat_interleave(block_rows, dim=0)[:rows]


def _dequantized_gemm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiply in float32, on any CPU with the same bits and in the same memory.

    `torch._scaled_mm` has these bits where it dequantises, too. On a CPU with AMX it asks oneDNN instead
    (aten/src/ATen/native/Blas.cpp), with which a loss in many tiles took over 10 minutes, not 4 s.
    """
    left = partial(_dequantized_rows, a, a_scale_inv)
    right = partial(_dequantized_rows, b, b_scale_inv)
    return product_in_tiles(left, right, (a.shape[0], b.shape[0], a.shape[1]), bias, out_dtype)


def _dequantized_rows(q: Tensor, scale_inv: Tensor, rows: slice) -> Tensor:
    """Dequantise rows of a matrix; with scales of blocks, they begin at the start of a block."""
    if scale_inv.dim() < 2:
        return dequantize(q[rows], scale_inv)
    height = 1 if scale_inv.shape[0] == q.shape[0] else BLOCK
    return dequantize(q[rows], scale_inv[rows.start // height : -(-rows.stop // height)])
