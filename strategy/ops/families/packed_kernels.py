"""Kernels of attention within the documents of packed rows: one call of PyTorch's on CUDA, a few on a CPU.

Both take `(query, key, value, boundaries, scale, window)`. On CUDA no number leaves the device: the longest document is
taken to be as long as a row. On a CPU, neighbours of one length are a batch. A window is the kernel's own on CUDA; on a
CPU documents that are longer have a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from thunder_memsave.ops.cuda_device import device_of
from thunder_memsave.ops.families.attention import (
    flash_applies,
    scaled_dot_product_attention,
    share_heads,
)
from thunder_memsave.ops.families.attention_kernels import (
    Gradients,
    Saved,
    attention_kernel,
    cpu_blocks_bytes,
    flash_backward_bytes,
)
from thunder_memsave.ops.families.packed_attention import (
    band_of,
    mask_between,
    packed_attention,
    padding_starts,
    paddings,
    runs,
    whole_rows,
)
from thunder_memsave.ops.families.windowed_attention import flash_backward, flash_forward
from thunder_memsave.ops.kernel_calls import call_kernel, in_autocasts_dtype
from thunder_memsave.ops.operation import Kernel, Operand, Operation

_log = logging.getLogger(__name__)

_ROWS = 128
"""Rows by which flash attention's backward may exceed each document (flash_attn/flash_api.cpp)."""


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    num_rows, _, length, _ = query.shape
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    # In PyTorch's order of memory for the kernel's own results.
    output = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    results = output.transpose(1, 2), query.new_empty(query.shape[:-1], dtype=dtype)
    _write_zeros_into_padding(results, boundaries)
    for run in runs(boundaries, num_rows, length):
        band = band_of(run.length, window, query)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(run.of(t) for t in (query, key, value)),
            *(0.0, band is None),
            attn_mask=band,
            scale=scale,
        )
        for result, part in zip(results, parts, strict=True):
            run.of(result).copy_(part)
        del parts, part  # before the next run's
    return results


def _cpu_backward(
    saved: Saved, boundaries: Tensor, scale: float | None, window: int | None = None
) -> Gradients:
    _, query, key, value, *_ = saved
    num_rows, _, length, _ = query.shape
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    _write_zeros_into_padding(grads, boundaries)
    for run in runs(boundaries, num_rows, length):
        operands = map(run.of, saved)
        band = band_of(run.length, window, query)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, 0.0, band is None, attn_mask=band, scale=scale
        )
        for whole, part in zip(grads, parts, strict=True):
            run.of(whole).copy_(part)
        del parts, part
    return grads


def _write_zeros_into_padding(results: Sequence[Tensor], boundaries: Tensor) -> None:
    num_rows, _, length = results[0].shape[:3]
    for padding in paddings(boundaries, num_rows, length):
        for result in results:
            padding.of(result).zero_()


def _cuda_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    length = query.shape[-2]
    operands = (_one_after_the_other(t) for t in (query, key, value))
    output, logsumexp = flash_forward(operands, boundaries, length, scale, window)
    return _without_padding(_by_rows(output, query), boundaries), logsumexp


def _cuda_backward(
    saved: Saved, boundaries: Tensor, scale: float | None, window: int | None = None
) -> Gradients:
    *tensors, logsumexp = saved
    length = saved.query.shape[-2]
    operands = map(_one_after_the_other, tensors)
    grads = flash_backward(operands, logsumexp, boundaries, length, scale, window)
    of_query, of_key, of_value = (
        _without_padding(_by_rows(g, like), boundaries)
        for g, like in zip(grads, saved[1:4], strict=True)
    )
    return of_query, of_key, of_value


def _one_after_the_other(heads: Tensor) -> Tensor:
    """Return (rows, heads, length, width) as (rows * length, heads, width)."""
    return heads.transpose(1, 2).flatten(0, 1)


def _by_rows(heads: Tensor, like: Tensor) -> Tensor:
    num_rows, _, length, _ = like.shape
    return heads.view(num_rows, length, *heads.shape[1:]).transpose(1, 2)


def _without_padding(heads: Tensor, boundaries: Tensor) -> Tensor:
    """Write zeros where a row has no document; the kernel takes the padding for one."""
    num_rows, _, length, _ = heads.shape
    positions = torch.arange(num_rows * length, dtype=torch.int32, device=heads.device)
    is_padding = positions.view(num_rows, length) >= padding_starts(boundaries, num_rows)[:, None]
    heads.masked_fill_(is_padding[:, None, :, None], 0.0)
    return heads


def _whole_rows(arguments: Sequence[Tensor]) -> None:
    heads, boundaries = arguments[0], arguments[-1]
    whole_rows(boundaries, heads.shape[0], heads.shape[2])


def _cuda_backward_bytes(operands: Sequence[Operand]) -> int:
    _, query, key, *_, boundaries = operands
    num_rows, _, length, _ = query.shape
    num_documents = boundaries.shape[0] - 1
    return flash_backward_bytes(query, key, num_rows=num_rows * length + _ROWS * num_documents)


cpu_packed = attention_kernel(
    "cpu_packed_attention",
    forward=_cpu_forward,
    backward=_cpu_backward,
    settings=("boundaries", "scale", "window"),
    scratch={"cpu": cpu_blocks_bytes},
    backward_scratch={"cpu": cpu_blocks_bytes},
    numbers=_whole_rows,
)

cuda_packed = attention_kernel(
    "cuda_packed_attention",
    forward=_cuda_forward,
    backward=_cuda_backward,
    settings=("boundaries", "scale", "window"),
    logsumexp=lambda query: (query[1], query[0] * query[2]),
    backward_scratch={"cuda": _cuda_backward_bytes},
    numbers=_whole_rows,
)


def _packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute `packed_attention`; where no kernel takes the operands, by attention under a mask."""
    query, key, value = in_autocasts_dtype(query, key, value)
    kernel = None if dropout_p else _kernel_for(query, key, value)
    if kernel is not None:
        return call_kernel(kernel, query, key, value, boundaries, scale, window)
    _log.info(
        "no kernel takes packed rows of %s with %s numbers per head and dropout %s: they have a mask",
        query.dtype,
        query.shape[-1],
        dropout_p,
    )
    mask = mask_between(boundaries, query.shape[0], query.shape[2], window)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
    )


def _kernel_for(query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
    if device_of(query).type == "cuda":
        return cuda_packed if flash_applies(query, key, value, is_causal=True) else None
    return cpu_packed if share_heads(query, key, value) else None


OPERATIONS = (
    Operation(
        name="packed_attention",
        functions=(packed_attention,),
        run=_packed_attention,
        kernels=(cpu_packed, cuda_packed),
    ),
)
