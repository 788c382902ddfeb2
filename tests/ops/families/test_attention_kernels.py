"""The CUDA kernels on meta: shapes and dtypes are PyTorch's, and the mask has a layout that they can read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor

from harness.on_cuda import facts, on_cuda
from thunder_memsave.ops.claim import own_executor
from thunder_memsave.ops.families.attention import scaled_dot_product_attention
from thunder_memsave.ops.families.attention_kernels import (
    _bias,
    _cudnn_backward,
    _cudnn_forward,
    _efficient_backward,
    _efficient_forward,
    _flash_backward,
    _flash_forward,
)

HALF = torch.bfloat16
KERNELS: dict[str, tuple[Any, Any]] = {
    "cuda_flash_attention": (_flash_forward, _flash_backward),
    "cuda_cudnn_attention": (_cudnn_forward, _cudnn_backward),
    "cuda_efficient_attention": (_efficient_forward, _efficient_backward),
}


def heads(num: int, length: int, width: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(2, num, length, width, device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("kernel", "num_heads", "dtype", "mask_shape"),
    [
        ("cuda_flash_attention", 4, HALF, None),
        ("cuda_flash_attention", 2, HALF, None),
        ("cuda_cudnn_attention", 4, HALF, None),
        ("cuda_cudnn_attention", 2, HALF, None),
        ("cuda_efficient_attention", 4, HALF, (2, 1, 40, 40)),
        ("cuda_efficient_attention", 4, torch.float32, (40, 40)),
        ("cuda_efficient_attention", 4, torch.float32, None),
    ],
)
def test_what_the_trace_says_of_a_kernel_is_what_pytorch_says(
    kernel: str, num_heads: int, dtype: torch.dtype, mask_shape: tuple[int, ...] | None
) -> None:
    query, key = heads(4, 40, 64, dtype), heads(num_heads, 40, 64, dtype)
    mask = None if mask_shape is None else torch.empty(mask_shape, device="meta", dtype=torch.bool)
    settings = (mask, mask is None, None)
    run, differentiate = KERNELS[kernel]
    results = run(query, key, key, *settings)
    grads = differentiate(query, query, key, key, *results, *settings)
    forward, backward = (own_executor.opmap[n] for n in (kernel, f"{kernel}_backward"))
    with tracectx(TraceCtx(None)):
        q, k = on_cuda(query), on_cuda(key)
        said = forward.meta(q, k, k, None, True, None)
        said_grads = backward.meta(q, q, k, k, *said, None, True, None)
    assert facts(said) == facts(results)
    assert facts(said_grads) == facts(grads)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "width", "with_mask", "dropout_p", "symbols"),
    [
        (HALF, 4, 64, False, 0.0, ["cuda_flash_attention_prim"]),
        (HALF, 2, 64, False, 0.0, ["cuda_flash_attention_prim"]),
        (HALF, 4, 64, True, 0.0, ["cuda_efficient_attention_prim"]),
        (torch.float32, 4, 64, False, 0.0, ["cuda_efficient_attention_prim"]),
        (HALF, 4, 256, False, 0.0, ["cuda_flash_attention_prim"]),
        (HALF, 4, 264, False, 0.0, ["cuda_efficient_attention_prim"]),
        (torch.float64, 4, 64, False, 0.0, ["scaled_dot_product_attention"]),
        (HALF, 4, 12, False, 0.0, ["scaled_dot_product_attention"]),
        (HALF, 4, 64, False, 0.1, ["scaled_dot_product_attention"]),
    ],
)
def test_the_kernel_is_chosen_by_what_the_trace_is_for(
    dtype: torch.dtype,
    num_heads: int,
    width: int,
    with_mask: bool,
    dropout_p: float,
    symbols: list[str],
) -> None:
    trace = TraceCtx(None)
    with tracectx(trace):
        query, key = (
            on_cuda(heads(4, 40, width, dtype)),
            on_cuda(heads(num_heads, 40, width, dtype)),
        )
        mask = on_cuda(torch.empty(40, 40, device="meta", dtype=torch.bool)) if with_mask else None
        output = scaled_dot_product_attention(
            query, key, key, mask, dropout_p, not with_mask, enable_gqa=num_heads != 4
        )
    assert output.shape == query.shape
    assert [b.sym.name for b in trace.bound_symbols] == symbols


@pytest.mark.parametrize("num_columns", [32, 33])
@pytest.mark.parametrize("is_boolean", [True, False])
def test_the_mask_is_added_and_its_rows_start_at_multiples_of_16_bytes(
    num_columns: int, is_boolean: bool
) -> None:
    query, key = torch.zeros(2, 3, 5, 8), torch.zeros(2, 3, num_columns, 8)
    allowed = torch.rand(2, 1, 5, num_columns) > 0.5
    added = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
    bias = _bias(allowed if is_boolean else added, query, key)
    assert bias is not None
    assert torch.equal(bias, added.expand(2, 3, 5, num_columns))
    assert not any(stride % 16 for stride in bias.stride()[:-1])


def test_a_mask_of_one_column_serves_all_keys() -> None:
    query = torch.zeros(1, 1, 4, 8)
    allowed = torch.tensor([True, False, True, True]).reshape(4, 1)
    bias = _bias(allowed, query, torch.zeros(1, 1, 6, 8))
    assert bias is not None
    assert bias.shape == (1, 1, 4, 6)
    assert torch.equal(bias[0, 0, :, 5] == 0.0, allowed[:, 0])
    assert bias.stride(-1) == 1
