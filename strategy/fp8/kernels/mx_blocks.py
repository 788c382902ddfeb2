"""Casts to MXFP8 by PyTorch: blocks of 32 numbers along the dim that a product sums over, each with a scale of a byte.

The byte `b` (E8M0) stands for 2**(b - 127), and 255 for NaN; it is the inverse scale. The arithmetic is that of
TransformerEngine's kernels: `float_to_e8m0` in transformer_engine/common/util/ptx_arch_spec.cuh, `exp2f_rcp` and
`exp2f` in common/util/ptx.cuh, and common/cast/mxfp8/quantize_mxfp8.cuh, which rounds the amax over the largest number
up to a power of 2, drops NaN from the amax, and casts from the values themselves in both directions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_memsave.aten.record import once_through_memory
from thunder_memsave.fp8.kernels.casting import cached, magnitudes, saturated

MX_BLOCK = 32
"""Number of elements that share a scale."""

_MANTISSA_BITS = 23
_MANTISSA = 0x7FFFFF
_HALF_OF_SMALLEST = 0x400000
"""Bits of 2**-127 in float32, a subnormal number: 0 is its byte."""
_LARGEST, _NAN = 254, 255


def is_mx(scale_inv: Tensor) -> bool:
    """Return whether these are inverse scales of `quantize_mx`."""
    return scale_inv.dtype == torch.uint8


def quantize_mx(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast each 1x32 elements with the scale of their own amax.

    Args:
        x: `[rows, columns]` in any float dtype; columns are a multiple of 32.
        dtype: The fp8 dtype.

    Returns:
        x in fp8, and the inverse scales, E8M0 as uint8, `[rows, columns / 32]`.
    """
    return _quantized(x, dtype, x.shape[1])


def quantize_mx_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast each 32x1 elements with the scale of their own amax, and transpose.

    Args:
        x: `[rows, columns]` in any float dtype.
        dtype: The fp8 dtype.

    Returns:
        The transpose of x in fp8, whose rows end with zeros up to a multiple of 32, `[columns, rows + zeros]`; and the
        inverse scales, E8M0 as uint8, `[columns, (rows + zeros) / 32]`. Zeros change no amax and no sum.
    """
    return _quantized(x.t(), dtype, whole_blocks(x.shape[0]))


def quantize_mx_both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `quantize_mx`, and then those of `quantize_mx_columns`."""
    return *quantize_mx(x, dtype), *quantize_mx_columns(x, dtype)


def whole_blocks(size: int) -> int:
    """Round up to a multiple of 32."""
    return -(-size // MX_BLOCK) * MX_BLOCK


def dequantize_mx(q: Tensor, scale_inv: Tensor) -> Tensor:
    """Dequantise `[rows, columns]` to float32."""
    blocks: Tensor = q.float().unflatten(1, (-1, MX_BLOCK))
    return (blocks * _powers_of_2(scale_inv)[..., None]).flatten(1)


def _quantized(x: Tensor, dtype: torch.dtype, num_columns: int) -> tuple[Tensor, Tensor]:
    """Cast blocks of rows, which end with zeros up to `num_columns`."""
    rows, missing = x.shape[0], num_columns - x.shape[1]
    quantized = x.new_empty((rows, num_columns), dtype=dtype)
    scale_inv = x.new_empty((rows, num_columns // MX_BLOCK), dtype=torch.uint8)
    with once_through_memory(x, quantized, scale_inv):
        for first, length in cached(x, rows):
            part = slice(first, first + length)
            padded = torch.nn.functional.pad(x[part], (0, missing)) if missing else x[part]
            blocks = padded.unflatten(1, (-1, MX_BLOCK))
            bytes_ = _rounded_up(magnitudes(blocks).amax(2).float(), dtype)
            scale_inv[part] = bytes_
            scaled = blocks * _powers_of_2(_LARGEST - bytes_)[..., None]
            quantized[part] = saturated(scaled, dtype).to(dtype).flatten(1)
    return quantized, scale_inv


def _rounded_up(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of the inverse scales for these amaxes, none of them NaN, as int32."""
    # A product with the reciprocal, not a division, as in the kernels.
    ratio = amax * (1.0 / torch.finfo(dtype).max)
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & _MANTISSA
    is_power_of_2 = (mantissa == 0) | ((exponent == 0) & (mantissa <= _HALF_OF_SMALLEST))
    return torch.where(is_power_of_2, exponent, exponent + 1).clamp_max(_LARGEST)


def _powers_of_2(bytes_: Tensor) -> Tensor:
    """Return the numbers of these bytes, float32."""
    exponent = bytes_.int()
    bits = torch.where(exponent == 0, _HALF_OF_SMALLEST, exponent << _MANTISSA_BITS)
    return torch.where(exponent == _NAN, torch.nan, bits.view(torch.float32))
