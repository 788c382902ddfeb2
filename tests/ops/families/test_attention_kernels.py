"""The CUDA kernels on meta: shapes and dtypes are PyTorch's, and the mask has a layout that they can read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor

from harness.kernels_called import TORCHS_OWN, kernel_called
from harness.on_cuda import facts, on_cuda
from thunder_memsave.ops.families.attention import scaled_dot_product_attention
from thunder_memsave.ops.families.attention_kernels import (
    _bias,
    cuda_cudnn,
    cuda_efficient,
    cuda_flash,
)
from thunder_memsave.ops.operation import Kernel

HALF = torch.bfloat16


def heads(num: int, length: int, width: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(2, num, length, width, device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("kernel", "num_heads", "dtype", "mask_shape"),
    [
        (cuda_flash, 4, HALF, None),
        (cuda_flash, 2, HALF, None),
        (cuda_cudnn, 4, HALF, None),
        (cuda_cudnn, 2, HALF, None),
        (cuda_efficient, 4, HALF, (2, 1, 40, 40)),
        (cuda_efficient, 4, torch.float32, (40, 40)),
        (cuda_efficient, 4, torch.float32, None),
    ],
)
def test_what_the_trace_says_of_a_kernel_is_what_pytorch_says(
    kernel: Kernel, num_heads: int, dtype: torch.dtype, mask_shape: tuple[int, ...] | None
) -> None:
    query, key = heads(4, 40, 64, dtype), heads(num_heads, 40, 64, dtype)
    mask = None if mask_shape is None else torch.empty(mask_shape, device="meta", dtype=torch.bool)
    settings = (mask, mask is None, None)
    (backward,) = kernel.derivatives
    results = kernel.run(query, key, key, *settings)
    grads = backward.run(query, query, key, key, *results, *settings)
    with tracectx(TraceCtx(None)):
        q, k = on_cuda(query), on_cuda(key)
        said = kernel.meta(q, k, k, None, True, None)
        said_grads = backward.meta(q, q, k, k, *said, None, True, None)
    assert facts(said) == facts(results)
    assert facts(said_grads) == facts(grads)


@pytest.mark.parametrize(
    ("dtype", "num_heads", "width", "with_mask", "dropout_p", "kernel"),
    [
        (HALF, 4, 64, False, 0.0, "cuda_flash_attention"),
        (HALF, 2, 64, False, 0.0, "cuda_flash_attention"),
        (HALF, 4, 64, True, 0.0, "cuda_efficient_attention"),
        (torch.float32, 4, 64, False, 0.0, "cuda_efficient_attention"),
        (HALF, 4, 256, False, 0.0, "cuda_flash_attention"),
        (HALF, 4, 264, False, 0.0, "cuda_efficient_attention"),
        (torch.float64, 4, 64, False, 0.0, TORCHS_OWN),
        (HALF, 4, 12, False, 0.0, TORCHS_OWN),
        (HALF, 4, 64, False, 0.1, TORCHS_OWN),
    ],
)
def test_the_kernel_is_chosen_by_what_the_trace_is_for(
    dtype: torch.dtype,
    num_heads: int,
    width: int,
    with_mask: bool,
    dropout_p: float,
    kernel: str,
) -> None:
    query, key = heads(4, 40, width, dtype), heads(num_heads, 40, width, dtype)
    mask = torch.empty(40, 40, device="meta", dtype=torch.bool) if with_mask else None
    settings: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": not with_mask,
        "enable_gqa": num_heads != 4,
    }
    found = kernel_called(scaled_dot_product_attention, query, key, key, mask, **settings)
    assert found == kernel


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
