"""Emulates TransformerEngine's NVFP4 kernels of Blackwell by its own Python reference, on any device.

The reference is `transformer_engine/pytorch/custom_recipes/reference_nvfp4.py`, with which TransformerEngine tests its
kernels. Here are the checks and layouts of `pytorch/csrc/quantizer.cpp` and `common/gemm/cublaslt_gemm.cu`, and
stochastic rounding, which the reference does not have: by `stochastic_round_fp4_e2m1` of `common/util/ptx.cuh`, with
bits of PyTorch's generator. Not emulated: the generator of the kernels, and what they make of NaN.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

BLOCK = 16
_TILE = (128, 4)


def reference() -> Any:
    """Return the module of the reference; TransformerEngine must be importable."""
    return importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")


def quantizer_of(*, block_rows: int, with_rht: bool) -> Any:
    """Return the reference's quantiser, which casts in both directions."""
    formats = importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_utils")
    return reference().NVFP4QuantizerRef(
        dtype=formats.Fp4Formats.E2M1, quant_tile_shape=(block_rows, BLOCK), with_rht=with_rht
    )


def parts(x: Tensor, quantizer: Any) -> dict[str, Tensor | None]:
    """Emulate `NVFP4Quantizer::quantize`: bytes, padded scales and amaxes in the directions that are wanted."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] % BLOCK or rows.shape[1] % BLOCK:
        raise RuntimeError(f"NVFP4 requires tensor dims that are divisible by {BLOCK}")
    if quantizer.with_rht and x.dtype != torch.bfloat16:
        raise RuntimeError("RHT is only supported for bfloat16 input")
    own = quantizer_of(
        block_rows=BLOCK if quantizer.with_2d_quantization else 1, with_rht=quantizer.with_rht
    )
    with _rounding(is_stochastic=quantizer.stochastic_rounding):
        q, scales, columns, scales_of_columns, amax, amax_of_columns = own._quantize(rows)
    found: dict[str, Tensor | None] = {}
    for side, wanted, made in (
        ("rowwise", quantizer.rowwise_usage, (q, scales, amax)),
        ("columnwise", quantizer.columnwise_usage, (columns, scales_of_columns, amax_of_columns)),
    ):
        data, of_blocks, largest = made
        shape = (*x.shape[:-1], x.shape[-1] // 2) if side == "rowwise" else data.shape
        found[f"{side}_data"] = data.reshape(shape) if wanted else None
        found[f"{side}_scale_inv"] = _padded(of_blocks.view(torch.uint8)) if wanted else None
        found[f"amax_{side}"] = largest.clone() if wanted else None
    return found


def product(right: Any, left: Any, *, transa: bool, transb: bool) -> Tensor:
    """Emulate the product of two operands, in the order of `generic_gemm`: float32 `[left, right]`."""
    formats = importlib.import_module("transformer_engine.pytorch.custom_recipes.gemm")
    a = _compact(left, rowwise=not transb)
    b = _compact(right, rowwise=transa)
    held = reference().NVFP4TensorRef
    found: Tensor = quantizer_of(block_rows=1, with_rht=False).qgemm(
        *(a[0], b[0], formats.MMParams(), torch.float32, a[1], b[1]),
        gemm_type=formats.GEMMType.FPROP,
        qresult_x=held(global_amax_row=a[2], global_amax_col=a[2]),
        qresult_w=held(global_amax_row=b[2], global_amax_col=b[2]),
    )
    return found


def _compact(operand: Any, *, rowwise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return numbers, scales without padding and amax of an operand."""
    side = "rowwise" if rowwise else "columnwise"
    data, scales = (getattr(operand, f"_{side}_{part}") for part in ("data", "scale_inv"))
    assert data is not None, f"the {side} data of an operand in NVFP4 is missing"
    assert not operand._with_gemm_swizzled_scales, "swizzled scales are not emulated"
    data = data.reshape(-1, data.shape[-1])
    kept, num_blocks = data.shape[0], 2 * data.shape[1] // BLOCK
    assert kept % BLOCK == 0, "the quantiser makes no others"
    expected = tuple(-(-n // of) * of for n, of in zip((kept, num_blocks), _TILE, strict=True))
    assert tuple(scales.shape) == expected, f"scales of shape {tuple(scales.shape)}, not {expected}"
    compact = scales[:kept, :num_blocks].contiguous().view(torch.float8_e4m3fn)
    return data, compact, getattr(operand, f"_amax_{side}")


@contextlib.contextmanager
def _rounding(*, is_stochastic: bool) -> Iterator[None]:
    if not is_stochastic:
        yield
        return
    nearest = reference().cast_to_fp4x2
    with patch.object(reference(), "cast_to_fp4x2", lambda x: nearest(_rounded(x))):
        yield


def _rounded(x: Tensor) -> Tensor:
    """Round to numbers of E2M1, which a second rounding keeps."""
    magnitude = x.abs()
    jittered = magnitude + torch.rand_like(x) * _step(magnitude)
    step = _step(jittered)
    return torch.copysign((torch.floor(jittered / step) * step).clamp(max=6.0), x)


def _step(magnitude: Tensor) -> Tensor:
    return torch.where(magnitude >= 4, 2.0, torch.where(magnitude >= 2, 1.0, 0.5))


def _padded(scales: Tensor) -> Tensor:
    down, across = (-n % of for n, of in zip(scales.shape, _TILE, strict=True))
    return torch.nn.functional.pad(scales, (0, across, 0, down))
