"""Scaled dot product attention on CPU: one flash-attention operator where it applies, else a decomposition.

Thunder decomposes attention on CPU: it saves twice what eager saves, and a row that is masked entirely (left padding)
becomes NaN where eager gives zeros. On CUDA the executors that Thunder brings (cuDNN, flash) claim attention.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from thunder_memsave import compat

compat.apply()

import thunder.torch as ltorch  # noqa: E402
from thunder.core import devices, dtypes, prims  # noqa: E402
from thunder.core.proxies import TensorProxy  # noqa: E402
from thunder.core.symbol import Symbol  # noqa: E402
from thunder.extend import OperatorExecutor, register_executor  # noqa: E402

attention_executor = OperatorExecutor("thunder_memsave_attention", version="0")
register_executor(attention_executor)


def _flash_forward_meta(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    mask: TensorProxy | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[TensorProxy, TensorProxy]:
    logsumexp = TensorProxy(
        shape=query.shape[:-1], device=query.device, dtype=_accumulate_dtype(query.dtype)
    )
    return TensorProxy(like=query), logsumexp


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def _flash_backward_meta(
    grad: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, *_: Any
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        grad, query, key, value, output, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
    )


_forward = attention_executor.register_operator(
    "cpu_flash_attention", meta=_flash_forward_meta, fn=_flash_forward
)
_backward = attention_executor.register_operator(
    "cpu_flash_attention_backward", meta=_flash_backward_meta, fn=_flash_backward
)


def _flash_meta(query: TensorProxy, *_: Any) -> TensorProxy:
    return TensorProxy(like=query)


def _flash_execution(*args: Any) -> TensorProxy:
    return _forward(*args)[0]


def _flash_grad(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, *settings: Any
) -> TensorProxy:
    output, logsumexp = _forward(query, key, value, *settings)
    grad = prims.get_grad(output)
    grads = _backward(grad, query, key, value, output, logsumexp, *settings)
    for operand, gradient in zip((query, key, value), grads, strict=True):
        prims.put_grad(operand, gradient)
    return output


_flash = Symbol(
    "flash_attention", meta=_flash_meta, id="thunder_memsave.flash_attention", is_prim=True
)
attention_executor.register_implementation(
    _flash, execution_transform=_flash_execution, grad_transform=_flash_grad
)


def scaled_dot_product_attention(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    attn_mask: TensorProxy | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mask_needs_grad: bool = False,
) -> TensorProxy:
    """`torch.nn.functional.scaled_dot_product_attention` on proxies; the arguments are the same.

    `mask_needs_grad`: whether the mask is trained, as a position bias is. The kernels give it no gradient.
    """
    if enable_gqa:
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    if query.device.devicetype is not devices.DeviceType.CPU and not mask_needs_grad:
        return ltorch.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )
    mask = _additive(attn_mask, query)
    if not mask_needs_grad and _flash_applies(query, key, value, mask, dropout_p):
        return _flash(query, key, value, mask, is_causal, scale)
    return _decomposed(query, key, value, mask, dropout_p, is_causal, scale)


def _flash_applies(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    mask: TensorProxy | None,
    dropout_p: float,
) -> bool:
    operands = (query, key, value)
    return (
        dropout_p == 0.0
        and all(t.ndim == 4 and t.shape[-1] == query.shape[-1] for t in operands)
        and all(t.shape[:2] == query.shape[:2] for t in operands)
        and (mask is None or mask.ndim in (2, 4))
    )


def _decomposed(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    mask: TensorProxy | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> TensorProxy:
    """softmax(query @ key^T * scale + mask) @ value; rows that attend to nothing give zeros, also in the gradient."""
    factor = math.sqrt(scale if scale is not None else 1.0 / math.sqrt(query.shape[-1]))
    logits = (query * factor) @ (key.transpose(-2, -1) * factor)
    if is_causal:
        rows, columns = logits.shape[-2:]
        allowed = ltorch.ones(rows, columns, device=query.device, dtype=dtypes.bool8).tril()
        logits = ltorch.where(allowed, logits, -math.inf)
    if mask is not None:
        logits = logits + mask
    dead = (logits == -math.inf).all(-1, keepdim=True)
    weights = ltorch.softmax(ltorch.where(dead, 0.0, logits), dim=-1)
    weights = ltorch.where(dead, 0.0, weights)
    return ltorch.dropout(weights, dropout_p) @ value


def _additive(mask: TensorProxy | None, query: TensorProxy) -> TensorProxy | None:
    if mask is None or not dtypes.is_boolean_dtype(mask.dtype):
        return mask
    zeros = ltorch.zeros(*mask.shape, device=mask.device, dtype=query.dtype)
    return ltorch.where(mask, zeros, -math.inf)


def _repeat_heads(heads: TensorProxy, query: TensorProxy) -> TensorProxy:
    """Grouped-query attention: each key/value head serves `query heads / heads` consecutive query heads."""
    return ltorch.repeat_interleave(heads, query.shape[-3] // heads.shape[-3], -3)


def _accumulate_dtype(dtype: Any) -> Any:
    return dtypes.float64 if dtype is dtypes.float64 else dtypes.float32
