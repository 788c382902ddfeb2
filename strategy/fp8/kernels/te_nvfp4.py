"""NVFP4 by TransformerEngine: the casts and the product of `nvfp4_blocks.py`, laid out as its kernels write and read.

Its quantiser takes matrices whose sides are multiples of 16, and writes a cast by columns transposed, so that every
product sums over the last dim of both operands. Scales are padded to multiples of 128 numbers and 4 blocks; the GEMM
copies them into the order in which cuBLAS reads them (transformer_engine/pytorch/csrc/quantizer.cpp,
csrc/extensions/swizzle.cpp). Here, scales have no padding between cast and product.

Its kernel draws the bits of stochastic rounding from PyTorch's generator of the device, which is set to the seed
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_memsave.aten.record import once_through_memory
from thunder_memsave.fp8.kernels.cublas_gemm import with_zeros
from thunder_memsave.fp8.kernels.mx_blocks import MX_BLOCK
from thunder_memsave.fp8.kernels.nvfp4_blocks import BY_COLUMNS, BY_ROWS, NVFP4_BLOCK, Quantized
from thunder_memsave.fp8.kernels.te_library import loaded

_TILE = (128, 4)
"""Scales that cuBLAS reads together: numbers of the kept dim, and blocks of the summed dim."""

_TRANSFORM_TILE = (64, 128)
"""Multiples of rows and columns of which a kernel transforms and casts at once; otherwise a transformed copy is made
(`is_eligible_for_rht_cast_fusion` in csrc/quantizer.cpp)."""


def quantize_nvfp4(x: Tensor, block_rows: int, seed: Tensor | None) -> Quantized:
    """Cast each block with a scale of its own amax: `nvfp4_blocks.quantize_nvfp4`."""
    padded = _whole_rows(x)
    if isinstance(x, FakeTensor):
        return _without_data(padded, x.shape)
    quantizer = _quantizer(block_rows, seed, by_rows=True)
    with _drawing_from(seed, BY_ROWS, x.device):
        return _of_rows(loaded().extension.quantize(padded, quantizer), x.shape)


def quantize_nvfp4_columns(x: Tensor, block_rows: int, seed: Tensor | None) -> Quantized:
    """Cast the transpose, transformed if blocks have one row: `nvfp4_blocks.quantize_nvfp4_columns`."""
    padded = _whole_rows(x)
    if isinstance(x, FakeTensor):
        return _columns_without_data(padded, block_rows)
    quantizer = _quantizer(block_rows, seed, by_columns=True)
    with _drawing_from(seed, BY_COLUMNS, x.device):
        return _of_columns(loaded().extension.quantize(padded, quantizer))


def quantize_nvfp4_both(x: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `quantize_nvfp4`, and then those of `quantize_nvfp4_columns`, by one call."""
    padded = _whole_rows(x)
    if isinstance(x, FakeTensor):
        return *_without_data(padded, x.shape), *_columns_without_data(padded, 1)
    quantizer = _quantizer(1, None, by_rows=True, by_columns=True)
    made = loaded().extension.quantize(padded, quantizer)
    return *_of_rows(made, x.shape), *_of_columns(made)


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
    """Multiply `a @ b.t() + bias`: `nvfp4_blocks.gemm_nvfp4`; rows of b are a multiple of 16."""
    left = [with_zeros(t, rows=NVFP4_BLOCK).contiguous() for t in (a, a_scales)]
    scales = [with_zeros(t, rows=_TILE[0], columns=_TILE[1]) for t in (left[1], b_scales)]
    bias = None if bias is None else bias.to(out_dtype)
    if isinstance(a, FakeTensor):
        return _made(left[0], b, scales, out_dtype)[: a.shape[0]]
    product, *_ = loaded().general_gemm(
        _storage(b.contiguous(), scales[1], b_amax),
        _storage(left[0], scales[0], a_amax),
        out_dtype=out_dtype,
        layout="TN",
        bias=bias,
        use_split_accumulator=not use_fast_accum,
    )
    return product[: a.shape[0]]  # type: ignore[no-any-return]


def _whole_rows(x: Tensor) -> Tensor:
    """Append rows of zeros up to whole pairs of blocks, the least that cuBLAS sums over."""
    return with_zeros(x, rows=MX_BLOCK)


def _quantizer(
    block_rows: int, seed: Tensor | None, *, by_rows: bool = False, by_columns: bool = False
) -> Any:
    is_transformed = by_columns and block_rows == 1
    quantizer = loaded().tensor.NVFP4Quantizer(
        rowwise=by_rows,
        columnwise=by_columns,
        with_rht=is_transformed,
        with_post_rht_amax=is_transformed,
        with_2d_quantization=block_rows != 1,
        stochastic_rounding=seed is not None,
    )
    quantizer.internal = True  # return no tensor subclass, which autograd would track
    return quantizer


@contextmanager
def _drawing_from(seed: Tensor | None, number: int, device: torch.device) -> Iterator[None]:
    """Set the device's generator to a seed inside, and restore it afterwards."""
    if seed is None:
        yield
        return
    is_cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index] if is_cuda else torch.default_generator
    before = generator.get_state()
    generator.manual_seed(int(seed) + number)
    try:
        yield
    finally:
        generator.set_state(before)


def _of_rows(made: Any, shape: torch.Size) -> Quantized:
    rows, columns = shape
    scales = made._rowwise_scale_inv[:rows, : columns // NVFP4_BLOCK].contiguous()
    return made._rowwise_data[:rows], scales.view(torch.float8_e4m3fn), made._amax_rowwise


def _of_columns(made: Any) -> Quantized:
    numbers = made._columnwise_data
    rows, num_blocks = numbers.shape[0], 2 * numbers.shape[1] // NVFP4_BLOCK
    scales = made._columnwise_scale_inv[:rows, :num_blocks].contiguous()
    return numbers, scales.view(torch.float8_e4m3fn), made._amax_columnwise


def _storage(numbers: Tensor, padded_scales: Tensor, amax: Tensor) -> Any:
    """Wrap plain tensors as the quantised matrix that the GEMM takes, without a copy."""
    library = loaded()
    return library.tensor.NVFP4TensorStorage(
        rowwise_data=numbers,
        rowwise_scale_inv=padded_scales.view(torch.uint8),
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=amax,
        amax_columnwise=None,
        fp4_dtype=library.extension.DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
    )


def _without_data(x: Tensor, kept: torch.Size) -> Quantized:
    """Return results of a cast by rows without data, with its memory traffic: once for the amax, once for the cast."""
    rows, columns = x.shape
    numbers = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    padded = [_up_to(n, of) for n, of in zip((rows, columns // NVFP4_BLOCK), _TILE, strict=True)]
    scales = x.new_empty(padded, dtype=torch.float8_e4m3fn)
    with once_through_memory(x, x, numbers):
        numbers.copy_(x[:, : columns // 2])
    amax = x.new_empty(1, dtype=torch.float32)
    return numbers[: kept[0]], scales[: kept[0], : columns // NVFP4_BLOCK].contiguous(), amax


def _columns_without_data(x: Tensor, block_rows: int) -> Quantized:
    rows, columns = x.shape
    is_fused = rows % _TRANSFORM_TILE[0] == 0 and columns % _TRANSFORM_TILE[1] == 0
    transposed = x.new_empty((columns, rows)) if block_rows == 1 and not is_fused else x.t()
    return _without_data(transposed, transposed.shape)


def _made(a: Tensor, b: Tensor, scales: list[Tensor], out_dtype: torch.dtype) -> Tensor:
    """Return a product without data, beside the copies of the scales that the GEMM makes.

    Bytes count as numbers of 8 bits, of which tensor cores multiply half as many in the same time.
    """
    arranged = [torch.empty_like(of) for of in scales]
    one = arranged[0].view(-1)[:4].view(torch.float32)
    left, right = (t.view(torch.float8_e4m3fn) for t in (a, b.contiguous()))
    return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=out_dtype)


def _up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
