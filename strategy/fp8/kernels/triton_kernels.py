"""Triton kernels of fp8: cast with a scale and record the amax, cast blocks with scales of their own, transpose.

Numbers are rounded by integer arithmetic, as c10/util/Float8_e4m3fn.h and Float8_e5m2.h do: Triton's own conversion
depends on the chip, has one sign of NaN, and under Triton's interpreter loses carries. So the bits are PyTorch's on the
CPU, and those that the interpreter was compared with are those of the device.

`MAX`, `MANTISSA_BITS` and `BIAS` are the fp8 dtype's; fp8 numbers are read and written as bytes. Importing this module
imports Triton; `one_launch.py` launches the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast_kernel(
    x_ptr,
    scale_ptr,
    q_ptr,
    scale_inv_ptr,
    raised_ptr,
    num_elements,
    amax_epsilon,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    OF_AMAX: tl.constexpr,
    INSTEAD_OF_INF: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    INVERTS: tl.constexpr,
    RAISES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast `num_elements` with the scale at `scale_ptr`, or with `OF_AMAX` that of the amax there.

    With `INVERTS`, write its inverse to `scale_inv_ptr`; with `RAISES`, raise the float32 at `raised_ptr` to the amax.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    is_inside = at < num_elements - first
    x = tl.load(x_ptr + first + at, mask=is_inside, other=0.0)
    one = tl.arange(0, 1)
    scale = tl.load(scale_ptr + one)
    if OF_AMAX:
        scale = _scale_of(scale, amax_epsilon, INSTEAD_OF_INF, POWER_OF_2, MAX)
    q = _to_fp8(x, _float32(x) * scale, MAX, MANTISSA_BITS, BIAS)
    tl.store(q_ptr + first + at, q, mask=is_inside)
    if INVERTS:
        inverse = tl.div_rn(tl.full([1], 1.0, tl.float32), scale)
        tl.store(scale_inv_ptr + one, inverse, mask=one + first == 0)
    if RAISES:
        _raise(raised_ptr, tl.max(_magnitude(x), axis=0))


@triton.jit
def amax_kernel(x_ptr, raised_ptr, num_elements, BLOCK: tl.constexpr):
    """Raise the float32 at `raised_ptr` to the amax of `num_elements`."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + first + at, mask=at < num_elements - first, other=0.0)
    _raise(raised_ptr, tl.max(_magnitude(x), axis=0))


@triton.jit
def cast_blocks_kernel(
    x_ptr,
    q_ptr,
    scale_inv_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    amax_epsilon,
    INSTEAD_OF_INF: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast `[ROWS, COLUMNS]` of a matrix: one block, or `ROWS` blocks of one row each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * row_stride + column[None, :] * column_stride
    x = tl.load(x_ptr + at, mask=is_inside, other=0.0)
    amax = tl.max(_magnitude(x), axis=1)
    if not HAS_SCALE_PER_ROW:
        amax = tl.zeros([ROWS], tl.float32) + tl.max(amax, axis=0)
    scale = _scale_of(amax, amax_epsilon, INSTEAD_OF_INF, POWER_OF_2, MAX)
    q = _to_fp8(x, _float32(x) * scale[:, None], MAX, MANTISSA_BITS, BIAS)
    tl.store(q_ptr + row[:, None] * columns + column[None, :], q, mask=is_inside)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scale)
    if HAS_SCALE_PER_ROW:
        first = scale_inv_ptr + row * tl.num_programs(1) + tl.program_id(1)
        tl.store(first, inverse, mask=row < rows)
    else:
        block = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(scale_inv_ptr + block, tl.max(inverse, axis=0))


@triton.jit
def dequantize_rows_kernel(
    q_ptr,
    scale_inv_ptr,
    x_ptr,
    rows,
    columns,
    LARGEST: tl.constexpr,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write `ROWS` rows of a contiguous matrix, each with the inverse scale at its place, in the dtype of `x_ptr`.

    `LARGEST` is that dtype's largest number: none is infinite. NaN stays NaN.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    number = _of_fp8(tl.load(q_ptr + at, mask=is_inside, other=0), MAX, MANTISSA_BITS, BIAS)
    scale_inv = tl.load(scale_inv_ptr + row, mask=row < rows, other=0.0)
    x = number * scale_inv[:, None]
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    if x_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(x_ptr + at, _to_bfloat16(x), mask=is_inside)
    else:
        tl.store(x_ptr + at, x, mask=is_inside)


@triton.jit
def transpose_kernel(q_ptr, transposed_ptr, rows, columns, SIDE: tl.constexpr):
    """Write `[SIDE, SIDE]` bytes of a contiguous matrix into its transpose."""
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(q_ptr + row[:, None] * columns + column[None, :], mask=is_inside, other=0)
    target = transposed_ptr + column[:, None] * rows + row[None, :]
    tl.store(target, tl.trans(tile), mask=tl.trans(is_inside))


@triton.jit
def _float32(x):
    # By bits: Triton's interpreter makes zeros of bfloat16's subnormal numbers.
    if x.dtype == tl.bfloat16:
        widened = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return widened.to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _to_bfloat16(x):
    """Round to the nearest, ties to even; by bits, as `_float32`, and with NaN of the device's own bits."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _magnitude(x):
    """Return the magnitudes in float32, 0 for NaN."""
    value = _float32(x)
    return tl.where(value == value, tl.abs(value), 0.0)


@triton.jit
def _raise(raised_ptr, amax):
    # Few programs have a larger amax than all before them: most need no atomic operation on the one address.
    if amax > tl.load(raised_ptr):
        tl.atomic_max(raised_ptr, amax)


@triton.jit
def _to_fp8(x, scaled, MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """Round `scaled` to the nearest fp8 number, ties to even, as bytes; too large ones saturate, and signs are x's."""
    dropped: tl.constexpr = 23 - MANTISSA_BITS
    magnitude = tl.abs(scaled)
    magnitude = tl.where(magnitude > MAX, MAX, magnitude)  # NaN stays NaN
    bits = magnitude.to(tl.int32, bitcast=True)
    is_odd = (bits >> dropped) & 1
    normal = ((bits + ((1 << (dropped - 1)) - 1) + is_odd) >> dropped) - (
        (127 - BIAS) << MANTISSA_BITS
    )
    # Below the smallest normal number a float32 addition rounds: the last bit of `big` is a subnormal's.
    big: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA_BITS)
    big_bits: tl.constexpr = (127 + 24 - BIAS - MANTISSA_BITS) << 23
    subnormal = (magnitude + big).to(tl.int32, bitcast=True) - big_bits
    number = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
    number = tl.where(scaled == scaled, number, 0x7F)
    # Those of x before it is widened: a device need not keep a NaN's.
    if x.dtype.primitive_bitwidth == 16:
        is_negative = x.to(tl.int16, bitcast=True) < 0
    else:
        is_negative = x.to(tl.int32, bitcast=True) < 0
    return tl.where(is_negative, number | 0x80, number).to(tl.uint8)


@triton.jit
def _of_fp8(number, MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, BIAS: tl.constexpr):
    """Return the float32 numbers of fp8's bytes; what is above `MAX` is infinite or NaN, as its dtype has it."""
    bits = number.to(tl.int32)
    magnitude = bits & 0x7F
    # As the bits of a float32, whose exponent has another bias: a product with a power of 2 makes up for that.
    shifted = (magnitude << (23 - MANTISSA_BITS)).to(tl.float32, bitcast=True)
    value = shifted * (2.0 ** (127 - BIAS))
    infinite: tl.constexpr = float("inf")
    not_a_number: tl.constexpr = float("nan")
    is_infinite = (value > MAX) & (magnitude == (0x7C if MANTISSA_BITS == 2 else 0x80))
    value = tl.where(is_infinite, infinite, tl.where(value > MAX, not_a_number, value))
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def _scale_of(
    amax,
    amax_epsilon,
    INSTEAD_OF_INF: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    MAX: tl.constexpr,
):
    """Return the scales for amaxes, as `torch_backend._scale_of` does."""
    amax = tl.where(amax < amax_epsilon, amax_epsilon, amax)
    scale = tl.div_rn(tl.zeros_like(amax) + MAX, amax)
    infinite: tl.constexpr = float("inf")
    scale = tl.where(scale == infinite, INSTEAD_OF_INF, scale)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((amax == 0.0) | (amax == infinite), 1.0, scale)
