"""The operations of a trace that store an activation in fp8 from forward to backward, and make it again of that.

    x1, q, scale_inv = compress_to_fp8(x)               # x1 is x
    ...
    bw_x = decompress_from_fp8(q, scale_inv, (4, 128, 256), torch.bfloat16)

Each row of `BLOCK` elements, in the order of memory, has a scale of its own, a power of 2. So a number differs from
what it was by at most `RELATIVE` of itself, or `OF_LARGEST` of the largest magnitude of its row, whichever is more.
Source: COAT (Xi et al., 2024, arXiv 2410.19313), which stores the inputs of activation functions so.
"""

from __future__ import annotations

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_memsave.fp8.kernels.torch_backend import dequantize_rows, quantize_block
from thunder_memsave.ops.kernel_calls import own_executor
from thunder_memsave.planner.graph import COMPRESS, DECOMPRESS

BLOCK = 128
"""Number of elements with one scale."""
DTYPE = torch.float8_e4m3fn
RELATIVE = 2.0**-4
"""Half of the distance between neighbours, of numbers of at least 2**-6 times the scale's inverse."""
OF_LARGEST = 2.0**-17
"""Half of the distance between neighbours below those, as a part of the row's largest magnitude, which the scale brings
to more than 224."""


def store(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a contiguous tensor of whole rows of `BLOCK` elements, its numbers in fp8, and their inverse scales.

    Args:
        x: float32, bfloat16 or float16, of any shape; n rows are in it.

    Returns:
        `x` itself, fp8 `[n, BLOCK]`, and float32 `[n, 1]`.
    """
    quantized, scale_inv = quantize_block(x.data.view(-1, BLOCK), DTYPE, 1, BLOCK)
    return x, quantized, scale_inv


def make_again(
    quantized: Tensor, scale_inv: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return a tensor of this shape and dtype, of what `store` returned for one."""
    return dequantize_rows(quantized.data, scale_inv.data, dtype).view(shape)


def _compressed(x: TensorProxy) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    rows = x.numel // BLOCK
    quantized = TensorProxy(
        shape=(rows, BLOCK), device=x.device, dtype=dtypes.to_dtype(DTYPE), requires_grad=False
    )
    scale_inv = TensorProxy(
        shape=(rows, 1), device=x.device, dtype=dtypes.float32, requires_grad=False
    )
    return TensorProxy(like=x), quantized, scale_inv


def _decompressed(
    quantized: TensorProxy, scale_inv: TensorProxy, shape: tuple[int, ...], dtype: torch.dtype
) -> TensorProxy:
    return TensorProxy(
        shape=shape, device=quantized.device, dtype=dtypes.to_dtype(dtype), requires_grad=False
    )


compress = own_executor.register_operator(COMPRESS, meta=_compressed, fn=store)
decompress = own_executor.register_operator(DECOMPRESS, meta=_decompressed, fn=make_again)
