"""Emulates TransformerEngine's MXFP8 kernels of Blackwell, in arithmetic of its own, on any device.

It follows the sources of TransformerEngine 2.20: `common/cast/mxfp8/{quantize_mxfp8,swizzle}.cuh`, `float_to_e8m0` in
`common/util/ptx_arch_spec.cuh`, `exp2f_rcp` in `common/util/ptx.cuh`, the checks of `pytorch/csrc/quantizer.cpp` and
`common/transformer_engine.cpp`, and the layouts of `common/gemm/cublaslt_gemm.cu`. Unlike on Hopper, numbers that are
cast by columns are not transposed. Not emulated: the order in which a GEMM sums, and blocks of NaN alone in the kernel
for full chunks in both directions, whose `redux.sync` may find a NaN.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 32
_SCALES_OF_ROWS = (128, 4)
_LARGEST = {7: 448.0, 8: 57344.0}  # of e4m3 and e5m2, by TransformerEngine's DType
_DTYPES = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}


def parts(x: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    """Emulate `MXFP8Quantizer::quantize`: bytes and scales in both directions, as far as they are wanted."""
    assert not quantizer.with_2d_quantization, "blocks of 32x32 are not emulated"
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] % BLOCK or rows.shape[1] % BLOCK:
        raise RuntimeError(
            f"MXFP8 requires tensor dims that are divisible by {BLOCK} (got shape={tuple(x.shape)})"
        )
    found: dict[str, Tensor | None] = {}
    for side, wanted in (
        ("rowwise", quantizer.rowwise_usage),
        ("columnwise", quantizer.columnwise_usage),
    ):
        by_columns = side == "columnwise"
        data, scales = _cast(rows.t() if by_columns else rows, int(quantizer.dtype))
        padded = _padded(scales)
        if quantizer.optimize_for_gemm:
            # The kernel writes the order of the product into a buffer of the shape that it has without.
            padded = swizzled(padded).view(padded.t().shape if by_columns else padded.shape)
        else:
            padded = padded.t().contiguous() if by_columns else padded
        data = data.t().contiguous() if by_columns else data
        found[f"{side}_data"] = data.reshape(x.shape) if wanted else None
        found[f"{side}_scale_inv"] = padded if wanted else None
    return found


def values(operand: Any, *, rowwise: bool) -> Tensor:
    """Return an operand of a product as float32 [kept, summed], as cuBLAS reads it."""
    side = "rowwise" if rowwise else "columnwise"
    data = getattr(operand, f"_{side}_data")
    assert data is not None, f"the {side} data of an operand in MXFP8 is missing"
    numbers = data.view(_DTYPES[int(operand._fp8_dtype)]).float()
    numbers = numbers.reshape(-1, numbers.shape[-1])
    numbers = numbers if rowwise else numbers.t()
    kept, summed = numbers.shape
    assert kept % 8 == 0, "cuBLAS wants rows of 16 bytes in the result"
    assert summed % BLOCK == 0, "a block of the summed dim is cut"
    scales = getattr(operand, f"_{side}_scale_inv")
    num_scales = (kept, summed // BLOCK)
    down, across = (-(-n // m) * m for n, m in zip(num_scales, _SCALES_OF_ROWS, strict=True))
    expected = (down, across) if rowwise else (across, down)
    assert tuple(scales.shape) == expected, f"scales of shape {tuple(scales.shape)}, not {expected}"
    if operand._with_gemm_swizzled_scales:
        compact = _compact(scales.reshape(-1), down, across)
    else:
        compact = scales if rowwise else scales.t()
    factors = _exp2(compact[:kept, : summed // BLOCK])
    return numbers * factors.repeat_interleave(BLOCK, 1)


def byte_of(amax: float, dtype: int = 7) -> int:
    """Return the E8M0 scale of a block with this amax."""
    return int(_bytes_of(torch.tensor([amax]), dtype))


def swizzled(scales: Tensor) -> Tensor:
    """Return padded scales [kept, blocks] in the order of `gemm_swizzled_scale_idx`, flat."""
    return scales.reshape(-1)[_places(*scales.shape).argsort()]


def _compact(flat: Tensor, down: int, across: int) -> Tensor:
    return flat[_places(down, across)].view(down, across)


def _places(down: int, across: int) -> Tensor:
    """Return where each scale of [down, across] lies, in row-major order."""
    i, j = torch.meshgrid(torch.arange(down), torch.arange(across), indexing="ij")
    tile = (i // 128) * (across // 4) + j // 4
    return (tile * 512 + (i % 128 % 32) * 16 + (i % 128 // 32) * 4 + j % 4).reshape(-1)


def _cast(x: Tensor, dtype: int) -> tuple[Tensor, Tensor]:
    """Return bytes and scales of [kept, summed] with blocks along the summed dim."""
    blocks = x.contiguous().float().unflatten(1, (-1, BLOCK))
    amax = torch.where(blocks.isnan(), 0, blocks.abs()).amax(2)
    bytes_ = _bytes_of(amax, dtype)
    # exp2f_rcp: the reciprocal of the scale is a power of 2 in float32, down to 2**-127.
    scaled = blocks * torch.exp2(127.0 - bytes_.double()).float()[..., None]
    largest = _LARGEST[dtype]
    saturated = torch.where(scaled.isnan(), scaled, scaled.clamp(-largest, largest))
    return saturated.flatten(1).to(_DTYPES[dtype]).view(torch.uint8), bytes_.to(torch.uint8)


def _bytes_of(amax: Tensor, dtype: int) -> Tensor:
    """Emulate `float_to_e8m0` of the amax times the reciprocal of the largest number: rounded up, 0 to 254."""
    reciprocal = torch.tensor(1.0 / _LARGEST[dtype], dtype=torch.float32)
    ratio = (amax.float() * reciprocal).double()
    mantissa, exponent = torch.frexp(ratio)  # mantissas from 0.5, excluding 1
    up = torch.where(mantissa == 0.5, exponent - 1, exponent)
    found = torch.where(ratio == 0, 0, (up + 127).clamp(0, 254))
    return torch.where(ratio.isinf(), 254, found)


def _exp2(bytes_: Tensor) -> Tensor:
    powers = torch.exp2(bytes_.double() - 127.0).float()
    return torch.where(bytes_ == 255, torch.nan, powers)


def _padded(scales: Tensor) -> Tensor:
    down, across = (-n % m for n, m in zip(scales.shape, _SCALES_OF_ROWS, strict=True))
    return torch.nn.functional.pad(scales, (0, across, 0, down))
