"""Causal attention within a sliding window: on CUDA one kernel that takes no mask, elsewhere attention under the mask.

A position attends to itself and to the `window - 1` before it. PyTorch's flash kernels for CUDA take such a window, and
do no work outside of it; `scaled_dot_product_attention` has no argument for it, nor have the kernels for the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thunder_memsave.ops.cuda_device import device_of
from thunder_memsave.ops.families.attention import flash_applies, scaled_dot_product_attention
from thunder_memsave.ops.families.attention_kernels import (
    Gradients,
    Saved,
    attention_kernel,
    cuda_backward_bytes,
    no_dropout,
)
from thunder_memsave.ops.kernel_calls import call_kernel, in_autocasts_dtype
from thunder_memsave.ops.operation import Operation

_log = logging.getLogger(__name__)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    *,
    window: int,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` under a mask that is a sliding window.

    Args:
        query: (rows, heads, length, width).
        key: As `query`; with `enable_gqa`, with fewer heads.
        value: As `key`.
        attn_mask: Booleans, broadcast to (rows, heads, length, length): true from `window - 1` positions before to
            the position itself.
        window: Number of positions that each attends to, itself included.
        dropout_p: As in `scaled_dot_product_attention`, like the next two.
        scale: Factor of the scores.
        enable_gqa: Whether several heads of queries share one of keys and values.
    """
    if device_of(query).type == "cuda":
        operands = in_autocasts_dtype(query, key, value)
        if dropout_p == 0.0 and flash_applies(*operands, is_causal=True):
            return call_kernel(cuda_windowed, *operands, window, scale)
        _log.info(
            "no kernel takes a window of %s positions of %s with %s numbers per head and dropout %s: it has a mask",
            window,
            query.dtype,
            query.shape[-1],
            dropout_p,
        )
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
    )


def flash_forward(
    operands: Iterable[Tensor],
    boundaries: Tensor | None,
    length: int,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Run flash attention for CUDA, causal and within a window, and return its output and logsumexp.

    Args:
        operands: Query, key and value: (rows, length, heads, width), or with boundaries (positions, heads, width).
        boundaries: Of the documents of packed rows; None: there are none.
        length: Positions of a row.
        scale: Factor of the scores.
        window: Positions that each attends to at most, itself included; None: all before it.
    """
    results = torch.ops.aten._flash_attention_forward(
        *operands,
        *(boundaries, boundaries, length, length),
        0.0,
        True,
        False,
        scale=scale,
        **_window_sizes(window),
    )
    return results[0], results[1]


def flash_backward(
    operands: Iterable[Tensor],
    logsumexp: Tensor,
    boundaries: Tensor | None,
    length: int,
    scale: float | None,
    window: int | None,
) -> Sequence[Tensor]:
    """Return the gradients of query, key and value.

    Args:
        operands: The gradient of the output, query, key, value and output, as in `flash_forward`.
        logsumexp: Of `flash_forward`.
        boundaries: As in `flash_forward`, like the next three.
        length: Positions of a row.
        scale: Factor of the scores.
        window: Positions that each attends to at most.
    """
    grad, *others = operands
    grads: Sequence[Tensor] = torch.ops.aten._flash_attention_backward(
        grad,
        *others,
        logsumexp,
        *(boundaries, boundaries, length, length),
        0.0,
        True,
        *no_dropout(grad),
        scale=scale,
        **_window_sizes(window),
    )
    return grads


def _window_sizes(window: int | None) -> dict[str, int]:
    """Return the flash kernels' arguments for a causal window.

    Both count positions besides the query's own (github.com/Dao-AILab/flash-attention, "sliding window": a query
    attends to keys from `window_size_left` before to `window_size_right` after it, both included).
    """
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _forward(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    operands = (t.transpose(1, 2) for t in (query, key, value))
    output, logsumexp = flash_forward(operands, None, query.shape[2], scale, window)
    return output.transpose(1, 2), logsumexp


def _backward(saved: Saved, window: int, scale: float | None) -> Gradients:
    *tensors, logsumexp = saved
    operands = (t.transpose(1, 2) for t in tensors)
    grads = flash_backward(operands, logsumexp, None, saved.query.shape[2], scale, window)
    of_query, of_key, of_value = (g.transpose(1, 2) for g in grads)
    return of_query, of_key, of_value


cuda_windowed = attention_kernel(
    "cuda_windowed_attention",
    forward=_forward,
    backward=_backward,
    settings=("window", "scale"),
    backward_scratch={"cuda": cuda_backward_bytes},
)


OPERATIONS = (
    Operation(
        name="windowed_attention",
        functions=(windowed_attention,),
        run=windowed_attention,
        kernels=(cuda_windowed,),
    ),
)
