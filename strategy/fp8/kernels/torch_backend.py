"""The fp8 operations of a linear on plain tensors, by PyTorch: quantise, transpose, multiply.

The arithmetic is that of TransformerEngine's kernels, bit by bit, on the CPU too: a value is multiplied by its scale in
float32, saturates at the largest finite number of the fp8 type, and stays NaN if it was; the largest magnitude (amax)
counts infinities and not NaN (`fmaxf` in transformer_engine/common/cast/fp8/quantize_fp8.cuh).

Matrices are contiguous, with the dimension that is summed over last.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thunder_memsave.aten_record import once_through_memory

BLOCK = 128
"""The side of a block; on Hopper the GEMMs know no other."""

_CHUNK_ELEMENTS = 2**24
"""So many elements of an operand are in float32 at a time: 64 MiB, whatever its size."""

_CAST_ELEMENTS = {"cpu": 2**18, "cuda": 2**22}
"""So many are cast at a time, so that what is between the kernels of a cast stays in the cache: 1 MiB in float32 on
the CPU, 16 MiB on GPUs, whose second level holds 24 MiB and more from Ada on."""

_MULTIPLE = 16
"""cuBLAS's fp8 GEMMs want rows whose bytes are a multiple of this."""


def quantize_delayed(
    x: Tensor, scale: Tensor, amax_history: Tensor, index: int, dtype: torch.dtype, records: bool
) -> tuple[Tensor, Tensor]:
    """Cast with a scale from earlier steps, and note the amax for later ones.

    Args:
        x: In any float type and shape.
        scale: float32 `[tensors]`, of the linear's tensors in this direction; `scale[index]` is taken.
        amax_history: float32 `[length, tensors]`; its first row is the current step's.
        index: Which of the linear's tensors `x` is.
        dtype: The fp8 type.
        records: Whether `amax_history[0, index]` becomes the larger of itself and x's amax, in place: the same however
            often, and in whatever order, the casts of a step run.

    Returns:
        x in fp8, and the factor that undoes the scale, float32 `[1]`, which shares no memory with the state.
    """
    chosen = scale[index : index + 1]
    newest = amax_history[0, index] if records else None
    return cast(x, chosen, dtype, raised=newest), chosen.reciprocal()


def quantize_current(
    x: Tensor, dtype: torch.dtype, amax_epsilon: float = 0.0, force_pow_2_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Cast with the scale that x's own amax gives.

    Args:
        x: In any float type and shape.
        dtype: The fp8 type.
        amax_epsilon: The least that the amax is taken for.
        force_pow_2_scales: Whether scales are rounded down to powers of 2.

    Returns:
        x in fp8, and the factor that undoes the scale, float32 `[1]`.
    """
    scale = current_scale(
        amax(x), dtype, amax_epsilon=amax_epsilon, force_pow_2_scales=force_pow_2_scales
    )
    return cast(x, scale, dtype), scale.reciprocal()


def current_scale(
    amax: Tensor, dtype: torch.dtype, amax_epsilon: float = 0.0, force_pow_2_scales: bool = False
) -> Tensor:
    """The scale that `quantize_current` takes for a tensor of this amax, float32 `[1]`."""
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
    """Cast each block with the scale that the block's own amax gives.

    Args:
        x: `[rows, columns]` in any float type; the last blocks may be smaller than the others.
        dtype: The fp8 type.
        block_rows: 1 for inputs and gradients, 128 for weights.
        block_cols: 128.
        amax_epsilon: The least that an amax is taken for.
        force_pow_2_scales: Whether scales are rounded down to powers of 2.

    Returns:
        x in fp8, and the factors that undo the scales, float32 of `block_scales_shape`.
    """
    quantized = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    scales = x.new_empty(
        block_scales_shape(x.shape[0], x.shape[1], block_rows, block_cols), dtype=torch.float32
    )
    with once_through_memory(x, quantized, scales):
        for first, rows in _cached(x, x.shape[0], multiple=block_rows):
            part = x[first : first + rows]
            row_of_blocks = first // block_rows
            blocks = scales[row_of_blocks : row_of_blocks + -(-rows // block_rows)]
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
    """The scales that `quantize_block` takes for blocks of these amaxes, of a tensor whose type is `of`."""
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
    return _saturated(x * each, dtype).to(dtype)


def block_scales_shape(
    rows: int, columns: int, block_rows: int, block_cols: int = BLOCK
) -> tuple[int, int]:
    """How many blocks there are down and across a matrix."""
    return -(-rows // block_rows), -(-columns // block_cols)


def transpose(q: Tensor) -> Tensor:
    """Copy `[rows, columns]` to `[columns, rows]`.

    For scales of the whole tensor; where blocks have scales, x.t() is what is quantised.
    """
    return q.t().contiguous()


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
        a_scale_inv: float32 `[1]`, or what `quantize_block` gave.
        b: fp8 `[n, k]`.
        b_scale_inv: As `a_scale_inv`.
        bias: `[n]` or None; added before the result is rounded to `out_dtype`, except to float32 on CUDA, where it is
            added to the result.
        out_dtype: Of the result.
        use_fast_accum: Whether Hopper's tensor cores may add up with fewer bits; nothing elsewhere.

    Returns:
        `[m, n]`.
    """
    bias = None if bias is None else bias.to(out_dtype)
    if a.is_cuda:
        return _cuda_gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype, use_fast_accum)
    if a_scale_inv.dim() == 2:
        return _dequantized_gemm(a, a_scale_inv, b, b_scale_inv, bias, out_dtype)
    # Without out_dtype the product would be in fp8.
    return torch._scaled_mm(
        a, b.t(), scale_a=a_scale_inv, scale_b=b_scale_inv, bias=bias, out_dtype=out_dtype
    )


def dequantize(q: Tensor, scale_inv: Tensor) -> Tensor:
    """Give back in float32 what a quantised tensor stands for.

    Args:
        q: fp8, of any shape; `[rows, columns]` where blocks have scales.
        scale_inv: float32 `[1]`, or what `quantize_block` gave.
    """
    if scale_inv.dim() < 2:
        return q.float() * scale_inv
    rows, columns = q.shape
    # The only block heights that there are; blocks of one row have a scale in each.
    block_rows = 1 if scale_inv.shape[0] == rows else BLOCK
    return q.float() * _of_elements(scale_inv, rows, columns, block_rows, BLOCK)


def whole_rows(matrix: Tensor) -> Tensor:
    """Append zeros to the rows of an fp8 matrix where cuBLAS wants them longer; products are the same.

    Returns:
        The matrix itself where its rows are a multiple of 16.
    """
    missing = -matrix.shape[1] % _MULTIPLE
    if not missing:
        return matrix
    # Padding is not written for fp8 types; zero is zero in bytes as well.
    padded = torch.nn.functional.pad(matrix.view(torch.uint8), (0, missing))
    return padded.view(matrix.dtype)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude among the elements that are numbers, float32 without dimensions; 0 if there is none."""
    largest = x.new_zeros((), dtype=torch.float32)
    flat = x.reshape(-1)
    with once_through_memory(x):
        for first, length in _cached(flat, flat.numel()):
            _raise(largest, flat[first : first + length])
    return largest


def _raise(amax: Tensor, part: Tensor) -> None:
    """Let `amax` be the larger of itself and the part's, in place."""
    amax.copy_(torch.maximum(amax, _magnitudes(part).amax().float()))


def _magnitudes(x: Tensor) -> Tensor:
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf)


def _cached(x: Tensor, rows: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the chunks in which x is cast."""
    most = _CAST_ELEMENTS["cpu" if x.device.type == "cpu" else "cuda"]
    return _chunks(rows, x.numel() // max(rows, 1), most, multiple)


def _chunks(
    rows: int, columns: int, num_elements: int, multiple: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows), whole blocks of `multiple` rows at a time."""
    step = max(num_elements // max(columns, 1) // multiple, 1) * multiple
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, *, raised: Tensor | None = None) -> Tensor:
    """Cast with one scale, float32 `[1]`; what is too large becomes the largest number.

    Args:
        x: In any float type and shape.
        scale: What it is multiplied with.
        dtype: The fp8 type.
        raised: An amax that becomes the larger of itself and x's, in the same pass over x.
    """
    quantized = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    source, target = x.reshape(-1), quantized.view(-1)
    with once_through_memory(x, quantized):
        for first, length in _cached(source, source.numel()):
            part = slice(first, first + length)
            if raised is not None:
                _raise(raised, source[part])
            target[part].copy_(_saturated(source[part] * scale, dtype))
    return quantized


def _saturated(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    # Casts of some torch versions make NaN or infinity of what is too large; clamping keeps NaN.
    largest = torch.finfo(dtype).max
    return scaled.clamp_(-largest, largest)


def _scale_of(
    amax: Tensor,
    dtype: torch.dtype,
    *,
    amax_epsilon: float,
    force_pow_2_scales: bool,
    instead_of_inf: float,
) -> Tensor:
    """The scale for an amax: `compute_scale_from_amax` in transformer_engine/common/recipe/recipe_common.cuh."""
    amax = amax.clamp_min(amax_epsilon)
    # Not `number / tensor`, for which torch multiplies by the reciprocal, which rounds twice.
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
    scale = torch.where(scale.isinf(), instead_of_inf, scale)
    if force_pow_2_scales:
        exponent = scale.view(torch.int32) & 0x7F800000  # without the mantissa
        scale = exponent.view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


def block_amax(x: Tensor, block_rows: int, block_cols: int) -> Tensor:
    """The amax of each block, float32."""
    rows, columns = x.shape
    down, across = block_scales_shape(rows, columns, block_rows, block_cols)
    padding = (0, across * block_cols - columns, 0, down * block_rows - rows)
    padded = torch.nn.functional.pad(_magnitudes(x), padding)
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
    """Multiply in float32, of which there is no more than a few chunks at a time."""

    def tile(a_rows: slice, b_rows: slice) -> Tensor:
        left = _dequantized_rows(a, a_scale_inv, a_rows)
        found = left @ _dequantized_rows(b, b_scale_inv, b_rows).t()
        return found if bias is None else found.add_(bias[b_rows])

    tiles = [(a_rows, b_rows) for b_rows in _row_parts(b) for a_rows in _row_parts(a)]
    if len(tiles) == 1:  # a float32 result is not copied
        return tile(*tiles[0]).to(out_dtype)
    product = a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
    for rows in tiles:
        product[rows] = tile(*rows)
    return product


def _row_parts(matrix: Tensor) -> Iterator[slice]:
    for first, rows in _chunks(matrix.shape[0], matrix.shape[1], _CHUNK_ELEMENTS, BLOCK):
        yield slice(first, first + rows)


def _dequantized_rows(q: Tensor, scale_inv: Tensor, rows: slice) -> Tensor:
    """Rows of a matrix whose blocks have scales, in float32; they begin with a block."""
    height = 1 if scale_inv.shape[0] == q.shape[0] else BLOCK
    return dequantize(q[rows], scale_inv[rows.start // height : -(-rows.stop // height)])


def _cuda_gemm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    # cuBLAS adds no bias to a float32 result.
    added_later = bias if out_dtype == torch.float32 else None
    product = torch._scaled_mm(
        whole_rows(a),
        whole_rows(b).t(),
        scale_a=_cuda_scales(a, a_scale_inv),
        scale_b=_cuda_scales(b, b_scale_inv).t(),
        bias=bias if added_later is None else None,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
    )
    return product if added_later is None else product.add_(added_later)


def _cuda_scales(matrix: Tensor, scale_inv: Tensor) -> Tensor:
    """Lay scales out as cuBLAS reads them; `torch._scaled_mm` tells by shapes and strides which they are.

    Those of 1x128 blocks lie along the columns. Those of 128x128 blocks lie along the rows, which begin every 4 numbers
    (aten/src/ATen/native/cuda/ScaledBlas.cpp).
    """
    if scale_inv.dim() < 2:
        return scale_inv
    if scale_inv.shape[0] == matrix.shape[0]:
        return scale_inv.t().contiguous().t()
    columns = scale_inv.shape[1]
    return torch.nn.functional.pad(scale_inv, (0, -columns % 4))[:, :columns]
