"""Casts, amaxes and transposes of fp8 in one launch each, by Triton: the bits of `torch_backend` on the CPU.

In: a tensor on a CUDA device. Out: its fp8 numbers. `torch_backend` computes in chunks where Triton is not there.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_memsave.aten.record import FP8_DTYPES, once_through_memory
from thunder_memsave.ops.launches import available

_CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ELEMENTS = 4096
"""Number of elements that a program casts."""
_ROWS = 32
"""Number of rows of a matrix whose blocks of one row a program casts."""
_WARPS = 4
"""Number of warps of a program; a whole block has four times as many elements as `_ROWS` rows."""
_SIDE = 64
"""Side of the square that a program transposes, in elements."""
_EXACT = {"enable_fp_fusion": False}
"""Options of every kernel: no product and sum are rounded as one."""
_FORMATS = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}
"""Bits of the mantissa, and the exponent's bias."""


def applies(x: Tensor) -> bool:
    """Return whether Triton casts or transposes a tensor; where it is missing on CUDA, that is logged once.

    Devices that are planned for and not here are taken to have Triton, which PyTorch's wheels for CUDA bring along.
    """
    if x.dtype not in (*_CAST_DTYPES, *FP8_DTYPES):
        return False
    if x.device.type == "meta" or (_is_fake_cuda(x) and not torch.cuda.is_available()):
        return True
    return x.device.type == "cuda" and why_not() is None


@cache
def why_not() -> str | None:
    """Return why Triton launches nothing on this machine's CUDA device; None: it does. The first call tries it."""

    def launch() -> None:
        one = torch.ones(1, device="cuda")
        cast(one, one, torch.float8_e4m3fn)

    return available.why_not(
        launch,
        instead="fp8's torch backend casts in chunks of 4 Mi elements with 9 launches each, which takes longer than "
        "one kernel",
    )


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, *, raised: Tensor | None = None) -> Tensor:
    """Cast with one scale; values that are too large saturate.

    Args:
        x: float32, bfloat16 or float16, of any shape; copied first if it is not contiguous.
        scale: float32 `[1]`, above 0.
        dtype: The fp8 dtype.
        raised: An amax, float32 of one element, to raise to at least x's in the same launch.
    """
    return _cast(x, scale, dtype, raised=raised)


def quantize_delayed(
    x: Tensor, scale: Tensor, dtype: torch.dtype, raised: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Cast as `cast` does, and return the inverse scale, float32 `[1]`, of the same launch too."""
    scale_inv = torch.empty_like(scale)
    return _cast(x, scale, dtype, raised=raised, scale_inv=scale_inv), scale_inv


def quantize_current(
    x: Tensor, dtype: torch.dtype, amax_epsilon: float, force_pow_2_scales: bool
) -> tuple[Tensor, Tensor]:
    """Cast with the scale of x's own amax: arguments and results of `torch_backend.quantize_current`."""
    largest = amax(x).reshape(1)
    scale_inv = torch.empty_like(largest)
    quantized = _cast(
        x,
        largest,
        dtype,
        scale_inv=scale_inv,
        is_amax=True,
        amax_epsilon=amax_epsilon,
        force_pow_2_scales=force_pow_2_scales,
    )
    return quantized, scale_inv


def _cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    raised: Tensor | None = None,
    scale_inv: Tensor | None = None,
    is_amax: bool = False,
    amax_epsilon: float = 0.0,
    force_pow_2_scales: bool = False,
) -> Tensor:
    """Cast by one launch, which fills `scale_inv`; with `is_amax`, `scale` is the amax to compute the scale from."""
    source = x.reshape(-1)
    quantized = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    with once_through_memory(x, quantized):
        if not available.has_numbers(x):
            if raised is not None:
                raised.zero_()  # tells the planner that it is written
            return quantized
        with torch.cuda.device_of(x):
            # One program at least, which writes the inverse scale.
            _kernels().cast_kernel[(max(-(-x.numel() // _ELEMENTS), 1),)](
                source,
                scale,
                _bytes(quantized),
                scale if scale_inv is None else scale_inv,
                scale if raised is None else raised,
                x.numel(),
                amax_epsilon,
                INSTEAD_OF_INF=torch.finfo(torch.float32).max,
                INVERTS=scale_inv is not None,
                RAISES=raised is not None,
                BLOCK=_ELEMENTS,
                OF_AMAX=is_amax,
                POWER_OF_2=force_pow_2_scales,
                **_EXACT,
                **_format(dtype),
            )
    return quantized


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of the elements that are not NaN, 0-dim float32; 0 if there is none."""
    source, largest = x.reshape(-1), x.new_zeros((), dtype=torch.float32)
    with once_through_memory(x):
        if available.has_numbers(x) and x.numel():
            with torch.cuda.device_of(x):
                grid = (-(-x.numel() // _ELEMENTS),)
                _kernels().amax_kernel[grid](source, largest, x.numel(), BLOCK=_ELEMENTS, **_EXACT)
    return largest


def quantize_block(
    x: Tensor,
    dtype: torch.dtype,
    block_rows: int,
    block_cols: int,
    amax_epsilon: float,
    force_pow_2_scales: bool,
) -> tuple[Tensor, Tensor]:
    """Cast each block with the scale of its own amax: arguments and results of `torch_backend.quantize_block`.

    Args:
        x: `[rows, columns]`, float32, bfloat16 or float16, in any layout.
        dtype: The fp8 dtype.
        block_rows: 1, or a power of 2.
        block_cols: A power of 2.
        amax_epsilon: Lower bound of each amax.
        force_pow_2_scales: Whether scales are rounded down to powers of 2.
    """
    rows, columns = x.shape
    quantized = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    down, across = -(-rows // block_rows), -(-columns // block_cols)
    scale_inv = x.new_empty((down, across), dtype=torch.float32)
    rows_each = _ROWS if block_rows == 1 else block_rows
    with once_through_memory(x, quantized, scale_inv):
        if available.has_numbers(x) and x.numel():
            with torch.cuda.device_of(x):
                _kernels().cast_blocks_kernel[(-(-rows // rows_each), across)](
                    x,
                    _bytes(quantized),
                    scale_inv,
                    rows,
                    columns,
                    x.stride(0),
                    x.stride(1),
                    amax_epsilon,
                    INSTEAD_OF_INF=torch.finfo(x.dtype).max,
                    POWER_OF_2=force_pow_2_scales,
                    HAS_SCALE_PER_ROW=block_rows == 1,
                    ROWS=rows_each,
                    COLUMNS=block_cols,
                    num_warps=_WARPS if block_rows == 1 else 4 * _WARPS,
                    **_EXACT,
                    **_format(dtype),
                )
    return quantized, scale_inv


def dequantize_rows(q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise rows that have one scale each: arguments and result of `torch_backend.dequantize_rows`."""
    rows, columns = q.shape
    result = torch.empty_like(q, dtype=dtype)
    with once_through_memory(q, scale_inv, result):
        if available.has_numbers(q) and q.numel():
            with torch.cuda.device_of(q):
                _kernels().dequantize_rows_kernel[(-(-rows // _ROWS),)](
                    _bytes(q),
                    scale_inv,
                    result,
                    rows,
                    columns,
                    LARGEST=torch.finfo(dtype).max,
                    ROWS=_ROWS,
                    COLUMNS=_power_of_2(columns),
                    num_warps=_WARPS,
                    **_EXACT,
                    **_format(q.dtype),
                )
    return result


def transpose(q: Tensor) -> Tensor:
    """Copy a contiguous fp8 matrix `[rows, columns]` to `[columns, rows]`."""
    if not available.has_numbers(q):
        return q.t().contiguous()
    rows, columns = q.shape
    transposed = q.new_empty(columns, rows)
    if q.numel():
        with torch.cuda.device_of(q):
            _kernels().transpose_kernel[(-(-rows // _SIDE), -(-columns // _SIDE))](
                _bytes(q.contiguous()), _bytes(transposed), rows, columns, SIDE=_SIDE, **_EXACT
            )
    return transposed


def _is_fake_cuda(x: Tensor) -> bool:
    return x.device.type == "cuda" and isinstance(x, FakeTensor)


def _power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not less."""
    return 1 << (number - 1).bit_length()


def _bytes(quantized: Tensor) -> Tensor:
    return quantized.view(torch.uint8)


def _format(dtype: torch.dtype) -> dict[str, Any]:
    mantissa_bits, bias = _FORMATS[dtype]
    return {"MAX": torch.finfo(dtype).max, "MANTISSA_BITS": mantissa_bits, "BIAS": bias}


@cache
def _kernels() -> ModuleType:
    return importlib.import_module("thunder_memsave.fp8.kernels.triton_kernels")
