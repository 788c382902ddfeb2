"""PyTorch's fp8 product on CUDA: operands and scales laid out as cuBLAS reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_MULTIPLE = 16
"""Multiple of bytes that rows must have for cuBLAS's fp8 GEMMs."""


def cuda_gemm(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Multiply as `torch_backend.gemm` does, on CUDA."""
    # cuBLAS adds no bias to a float32 result.
    added_later = bias if out_dtype == torch.float32 else None
    added_now = bias if added_later is None else None
    operands = whole_rows(a), whole_rows(b).t()
    if a_scale_inv.dim() < 2:
        product = torch._scaled_mm(
            *operands,
            scale_a=a_scale_inv,
            scale_b=b_scale_inv,
            bias=added_now,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    else:
        a_kind, a_scales = _of_blocks(a, a_scale_inv)
        b_kind, b_scales = _of_blocks(b, b_scale_inv)
        product = torch.nn.functional.scaled_mm(
            *operands,
            scale_a=a_scales,
            scale_recipe_a=a_kind,
            scale_b=b_scales,
            scale_recipe_b=b_kind,
            bias=added_now,
            output_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
        )
    return product if added_later is None else product.add_(added_later)


def _of_blocks(matrix: Tensor, scale_inv: Tensor) -> tuple[Any, Tensor]:
    """Return the kind of scales, and these as cuBLAS reads them.

    Those of 1x128 blocks are column-major. Those of 128x128 blocks are row-major, with rows padded to a multiple of 4,
    and given as their transpose
    (https://docs.nvidia.com/cuda/cublas/#element-1d-and-128x128-2d-block-scaling-for-fp8-data-types,
    aten/src/ATen/native/cuda/ScaledBlas.cpp). `torch._scaled_mm`, which is told no kinds, knows no padded rows.
    """
    kinds = torch.nn.functional.ScalingType
    if scale_inv.shape[0] == matrix.shape[0]:
        return kinds.BlockWise1x128, scale_inv.t().contiguous().t()
    padded = torch.nn.functional.pad(scale_inv, (0, -scale_inv.shape[1] % 4))
    return kinds.BlockWise128x128, padded.t()


def whole_rows(matrix: Tensor) -> Tensor:
    """Pad the rows of an fp8 matrix with zeros to the multiple that cuBLAS needs; products are the same.

    Returns:
        The matrix itself if its rows are a multiple of 16.
    """
    return with_zeros(matrix, columns=_MULTIPLE)


def with_zeros(matrix: Tensor, *, rows: int = 1, columns: int = 1) -> Tensor:
    """Append zeros up to a multiple of `rows` and of `columns`; the matrix itself, of any dtype, if it has as many."""
    down, across = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    if not (down or across):
        return matrix
    # `pad` does not support fp8 dtypes; zero is zero in bytes as well.
    numbers = matrix.view(torch.uint8) if matrix.element_size() == 1 else matrix
    return torch.nn.functional.pad(numbers, (0, across, 0, down)).view(matrix.dtype)
