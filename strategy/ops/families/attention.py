"""Scaled dot product attention: one kernel as one operator if one applies, else a decomposition.

Thunder decomposes attention on the CPU, and on CUDA if it cannot query a GPU, as in a plan: this saves at least twice
the bytes that eager saves, and a fully masked row (left padding) becomes NaN, where eager gives zeros. On CUDA, calls
that the kernels do not support, such as those with dropout, are left to Thunder's own executors.
"""

from __future__ import annotations

import math

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy

from thunder_memsave.ops.attention_choice import prefers_cudnn
from thunder_memsave.ops.cuda_device import Capability, capability_of
from thunder_memsave.ops.families.attention_kernels import (
    cpu_flash,
    cuda_cudnn,
    cuda_efficient,
    cuda_flash,
    of_other_executors,
)
from thunder_memsave.ops.operation import Call, Operation

_FLASH_DTYPES = (dtypes.bfloat16, dtypes.float16)
_FLASH_CAPABILITY = (8, 0)


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
    """Record `torch.nn.functional.scaled_dot_product_attention` on proxies; the arguments are the same.

    `mask_needs_grad`: whether the mask is trained, as a position bias is. The kernels compute no gradient for it.
    """
    if query.device.devicetype is devices.DeviceType.CUDA and not mask_needs_grad:
        if attn_mask is None and _cudnn_applies(query, key, value, dropout_p, is_causal):
            return cuda_cudnn.symbol(query, key, value, None, is_causal, scale)
        may_be_flash = attn_mask is None and torch.backends.cuda.flash_sdp_enabled()
        if may_be_flash and cuda_flash_applies(query, key, value, dropout_p, is_causal):
            return cuda_flash.symbol(query, key, value, None, is_causal, scale)
        key, value = (repeat_heads(t, query) if enable_gqa else t for t in (key, value))
        may_be_efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
        if may_be_efficient and _cuda_efficient_applies(query, key, value, attn_mask, dropout_p):
            return cuda_efficient.symbol(query, key, value, attn_mask, is_causal, scale)
        return ltorch.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale
        )
    mask = _additive(attn_mask, query)
    if not mask_needs_grad and cpu_flash_applies(query, key, value, mask, dropout_p):
        return cpu_flash.symbol(query, key, value, mask, is_causal, scale)
    key, value = (repeat_heads(t, query) if enable_gqa else t for t in (key, value))
    return _decomposed(query, key, value, mask, dropout_p, is_causal, scale)


def cuda_flash_applies(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, dropout_p: float, is_causal: bool
) -> bool:
    """Return whether the flash kernel for CUDA takes the operands."""
    return (
        dropout_p == 0.0
        and query.dtype in _FLASH_DTYPES
        and _share_heads(query, key, value)
        and query.shape[-1] % 8 == 0
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and (capability := capability_of(query.device.index)) >= _FLASH_CAPABILITY
        and _flash_differentiates(query.shape[-1], capability)
    )


def _cudnn_applies(
    query: TensorProxy, key: TensorProxy, value: TensorProxy, dropout_p: float, is_causal: bool
) -> bool:
    """Return whether cuDNN's kernel takes the operands, and PyTorch prefers it to flash."""
    return (
        dropout_p == 0.0
        and _share_heads(query, key, value)
        and prefers_cudnn(query, key, value, is_causal=is_causal)
    )


def _flash_differentiates(head_dim: int, capability: Capability) -> bool:
    """Return whether flash attention has a gradient for heads of this width (sdp_utils.cpp, sm86 to sm89 and sm12x)."""
    has_small_blocks = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return head_dim <= 256 and not (has_small_blocks and 192 < head_dim <= 224)


def _share_heads(query: TensorProxy, key: TensorProxy, value: TensorProxy) -> bool:
    """Return whether all heads have one width, and as many of the queries each share one of keys and values."""
    operands = (query, key, value)
    return (
        all(t.ndim == 4 and t.shape[-1] == query.shape[-1] for t in operands)
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1]
        and query.shape[1] % key.shape[1] == 0
    )


def _cuda_efficient_applies(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    mask: TensorProxy | None,
    dropout_p: float,
) -> bool:
    operands = (query, key, value)
    # The kernel reads 16 bytes at a time.
    num_aligned = 16 // query.dtype.bytes
    return (
        dropout_p == 0.0
        and query.dtype in (*_FLASH_DTYPES, dtypes.float32)
        and query.shape[-1] % num_aligned == 0
        and all(t.ndim == 4 and t.shape[-1] == query.shape[-1] for t in operands)
        and all(t.shape[:2] == query.shape[:2] for t in operands)
        and (mask is None or dtypes.is_boolean_dtype(mask.dtype) or mask.dtype is query.dtype)
    )


def cpu_flash_applies(
    query: TensorProxy,
    key: TensorProxy,
    value: TensorProxy,
    mask: TensorProxy | None,
    dropout_p: float,
) -> bool:
    """Return whether the kernel for the CPU takes the operands."""
    return (
        dropout_p == 0.0
        and _share_heads(query, key, value)
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
    """Compute softmax(query @ key^T * scale + mask) @ value; fully masked rows and their gradients are zero."""
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


def repeat_heads(heads: TensorProxy, query: TensorProxy) -> TensorProxy:
    """Repeat each key/value head for its `query heads / heads` consecutive query heads (grouped-query attention)."""
    return ltorch.repeat_interleave(heads, query.shape[-3] // heads.shape[-3], -3)


def _lower(call: Call) -> TensorProxy:
    mask_needs_grad = call.needs_grad(3, "attn_mask")
    return scaled_dot_product_attention(*call.args, **call.kwargs, mask_needs_grad=mask_needs_grad)


OPERATIONS = (
    Operation(
        name="attention",
        functions=(F.scaled_dot_product_attention,),
        lower=_lower,
        kernels=(cpu_flash, cuda_flash, cuda_cudnn, cuda_efficient),
        foreign=of_other_executors,
    ),
)
