"""MXFP8 by TransformerEngine: the casts and the product of `mx_blocks.py`, laid out as its kernels write and read them.

Its quantiser takes matrices whose sides are multiples of 32, and writes numbers cast by columns where they are, not
transposed. Scales are padded to multiples of 128 numbers and 4 blocks; the GEMM copies them into the order in which
cuBLAS reads them (transformer_engine/pytorch/csrc/quantizer.cpp, csrc/extensions/swizzle.cpp). Here, scales have no
padding between cast and product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_memsave.aten.record import once_through_memory
from thunder_memsave.fp8.kernels.cublas_gemm import with_zeros
from thunder_memsave.fp8.kernels.mx_blocks import MX_BLOCK
from thunder_memsave.fp8.kernels.te_library import loaded

_TILE = (128, 4)
"""Scales that cuBLAS reads together: numbers of the kept dim, and blocks of the summed dim."""


def quantize_mx(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast each 1x32 elements with the scale of their own amax: `mx_blocks.quantize_mx`."""
    return _of_rows(_cast(x, dtype, by_rows=True), x.shape)


def quantize_mx_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast each 32x1 elements with the scale of their own amax: `mx_blocks.quantize_mx_columns`.

    The results are transposed views of what the kernel writes.
    """
    return _of_columns(_cast(x, dtype, by_columns=True))


def quantize_mx_both(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `quantize_mx`, and then those of `quantize_mx_columns`, by one kernel."""
    made = _cast(x, dtype, by_rows=True, by_columns=True)
    return *_of_rows(made, x.shape), *_of_columns(made)


def mx_product(
    a: Tensor,
    a_scale_inv: Tensor,
    b: Tensor,
    b_scale_inv: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    """Multiply `a @ b.t() + bias`.

    Args:
        a: fp8 `[m, k]`, or a transposed view of `[k, m]`; its rows are padded with zeros to a multiple of 32.
        a_scale_inv: uint8 `[m, k / 32]`.
        b: fp8 `[n, k]`, or a transposed view; n is a multiple of 32.
        b_scale_inv: uint8 `[n, k / 32]`.
        bias: `[n]` in the result's dtype, or None.
        out_dtype: The result's dtype.
        use_fast_accum: Whether the tensor cores may accumulate in fewer bits.
    """
    left, right = _Operand.of(_whole_rows(a), _whole_rows(a_scale_inv)), _Operand.of(b, b_scale_inv)
    if left.is_by_columns and not right.is_by_columns:  # the one layout that its GEMM does not take
        left = _Operand.of(left.matrix.contiguous(), left.scale_inv)
    product = (_made if isinstance(a, FakeTensor) else _computed)(
        left, right, bias, out_dtype, use_fast_accum
    )
    return product[: a.shape[0]]


@dataclass(frozen=True, slots=True)
class _Operand:
    """A matrix in MXFP8 that a product sums over the last dim of."""

    matrix: Tensor
    scale_inv: Tensor
    is_by_columns: bool
    """Whether the summed dim is the first one in memory."""
    data: Tensor
    """The matrix as it is in memory, contiguous, as bytes."""
    padded_scale_inv: Tensor
    """The scales alike, with padding."""

    @classmethod
    def of(cls, matrix: Tensor, scale_inv: Tensor) -> _Operand:
        is_by_columns = not matrix.is_contiguous() and matrix.t().is_contiguous()
        held = (matrix.t(), scale_inv.t()) if is_by_columns else (matrix.contiguous(), scale_inv)
        rows, columns = _TILE[::-1] if is_by_columns else _TILE
        padded = with_zeros(held[1], rows=rows, columns=columns).contiguous()
        return cls(matrix, scale_inv, is_by_columns, held[0].view(torch.uint8), padded)

    def storage(self) -> Any:
        """Return the tensor that the GEMM takes, without a copy."""
        library = loaded()
        side, other = ("columnwise", "rowwise") if self.is_by_columns else ("rowwise", "columnwise")
        held = {
            f"{side}_data": self.data,
            f"{side}_scale_inv": self.padded_scale_inv,
            f"{other}_data": None,
            f"{other}_scale_inv": None,
        }
        return library.tensor.MXFP8TensorStorage(
            **held,
            fp8_dtype=library.dtypes[self.matrix.dtype],
            quantizer=None,
            with_gemm_swizzled_scales=False,
        )


def _computed(
    left: _Operand,
    right: _Operand,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    product, *_ = loaded().general_gemm(
        right.storage(),
        left.storage(),
        out_dtype=out_dtype,
        layout=f"{'N' if right.is_by_columns else 'T'}{'T' if left.is_by_columns else 'N'}",
        bias=bias,
        use_split_accumulator=not use_fast_accum,
    )
    return product  # type: ignore[no-any-return]


def _made(
    left: _Operand, right: _Operand, bias: Tensor | None, out_dtype: torch.dtype, _: bool
) -> Tensor:
    """Return a product without data, beside the copies of the scales that the GEMM makes."""
    arranged = [torch.empty_like(of.padded_scale_inv) for of in (left, right)]
    one = arranged[0].view(-1)[:4].view(torch.float32)
    a, b = (of.data.view(of.matrix.dtype).view(of.matrix.shape) for of in (left, right))
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out_dtype)


@dataclass(frozen=True, slots=True)
class _Made:
    """What the kernel writes where it is asked to: numbers with rows of zeros up to whole blocks, and padded scales."""

    rows: Tensor | None
    scales_of_rows: Tensor | None
    columns: Tensor | None
    scales_of_columns: Tensor | None


def _cast(
    x: Tensor, dtype: torch.dtype, *, by_rows: bool = False, by_columns: bool = False
) -> _Made:
    x = _whole_rows(x)
    if isinstance(x, FakeTensor):
        return _without_data(x, dtype, by_rows=by_rows, by_columns=by_columns)
    library = loaded()
    quantizer = library.tensor.MXFP8Quantizer(
        library.dtypes[dtype], rowwise=by_rows, columnwise=by_columns
    )
    quantizer.internal = True
    made = library.extension.quantize(x, quantizer)
    return _Made(
        made._rowwise_data.view(dtype) if by_rows else None,
        made._rowwise_scale_inv,
        made._columnwise_data.view(dtype) if by_columns else None,
        made._columnwise_scale_inv,
    )


def _without_data(x: Tensor, dtype: torch.dtype, *, by_rows: bool, by_columns: bool) -> _Made:
    """Return results of the kernel without data, with its memory traffic."""
    (rows, columns), (kept, summed) = x.shape, _TILE
    numbers = [
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) if wanted else None
        for wanted in (by_rows, by_columns)
    ]
    shapes = (
        (_up_to(rows, kept), _up_to(columns // MX_BLOCK, summed)),
        (_up_to(rows // MX_BLOCK, summed), _up_to(columns, kept)),
    )
    scales = [
        None if q is None else x.new_empty(shape, dtype=torch.uint8)
        for q, shape in zip(numbers, shapes, strict=True)
    ]
    made = [q for q in numbers if q is not None]
    with once_through_memory(x, *made):
        for q in made:
            q.copy_(x)
    return _Made(numbers[0], scales[0], numbers[1], scales[1])


def _of_rows(made: _Made, shape: torch.Size) -> tuple[Tensor, Tensor]:
    assert made.rows is not None
    assert made.scales_of_rows is not None
    rows, columns = shape
    return made.rows[:rows], made.scales_of_rows[:rows, : columns // MX_BLOCK].contiguous()


def _of_columns(made: _Made) -> tuple[Tensor, Tensor]:
    assert made.columns is not None
    assert made.scales_of_columns is not None
    rows, columns = made.columns.shape
    scales = made.scales_of_columns[: rows // MX_BLOCK, :columns].contiguous()
    return made.columns.t(), scales.t()


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _whole_rows(matrix: Tensor) -> Tensor:
    return with_zeros(matrix, rows=MX_BLOCK)
