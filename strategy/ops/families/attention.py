"""Scaled dot product attention: on CUDA by a kernel as one operator, where one applies; elsewhere as PyTorch runs it.

The kernel is chosen by shapes, dtypes and the device that is traced for, which may be absent, as PyTorch would choose:
so a plan has the operators of a real run. Calls that no kernel takes, such as those with dropout, are left to PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thunder_memsave.ops.attention_choice import prefers_cudnn
from thunder_memsave.ops.cuda_device import Capability, capability_of, device_of
from thunder_memsave.ops.families.attention_kernels import (
    cuda_cudnn,
    cuda_efficient,
    cuda_flash,
)
from thunder_memsave.ops.kernel_calls import call_kernel, in_autocasts_dtype
from thunder_memsave.ops.operation import Operation

_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_CAPABILITY = (8, 0)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention`; the arguments are the same."""
    mask_needs_grad = attn_mask is not None and attn_mask.requires_grad  # no kernel computes it
    if device_of(query).type == "cuda" and dropout_p == 0.0 and not mask_needs_grad:
        query, key, value = in_autocasts_dtype(query, key, value)
        mask = attn_mask
        if mask is not None and mask.is_floating_point():
            (mask,) = in_autocasts_dtype(mask)
        found = _by_kernel(query, key, value, mask, is_causal, scale, enable_gqa)
        if found is not None:
            return found
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _by_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Call the kernel that PyTorch prefers on CUDA; None: no kernel takes the operands."""
    operands = query, key, value
    if mask is None and _cudnn_applies(*operands, is_causal=is_causal):
        return call_kernel(cuda_cudnn, *operands, None, is_causal, scale)
    may_be_flash = mask is None and torch.backends.cuda.flash_sdp_enabled()
    if may_be_flash and flash_applies(*operands, is_causal=is_causal):
        return call_kernel(cuda_flash, *operands, None, is_causal, scale)
    key, value = (_repeated(t, query) if enable_gqa else t for t in (key, value))
    may_be_efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    if may_be_efficient and _efficient_applies(query, key, value, mask):
        return call_kernel(cuda_efficient, query, key, value, mask, is_causal, scale)
    return None


def flash_applies(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> bool:
    """Return whether the flash kernel for CUDA takes the operands."""
    return (
        query.dtype in _FLASH_DTYPES
        and share_heads(query, key, value)
        and query.shape[-1] % 8 == 0
        and not (is_causal and query.shape[-2] != key.shape[-2])
        and (capability := capability_of(query.device.index)) >= _FLASH_CAPABILITY
        and _flash_differentiates(query.shape[-1], capability)
    )


def _cudnn_applies(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> bool:
    """Return whether cuDNN's kernel takes the operands, and PyTorch prefers it to flash."""
    return share_heads(query, key, value) and prefers_cudnn(query, key, value, is_causal=is_causal)


def _flash_differentiates(head_dim: int, capability: Capability) -> bool:
    """Return whether flash attention has a gradient for heads of this width (sdp_utils.cpp, sm86 to sm89 and sm12x)."""
    has_small_blocks = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return head_dim <= 256 and not (has_small_blocks and 192 < head_dim <= 224)


def share_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether all heads have one width, and as many of the queries each share one of keys and values."""
    operands = (query, key, value)
    return (
        all(t.ndim == 4 and t.shape[-1] == query.shape[-1] for t in operands)
        and query.shape[0] == key.shape[0] == value.shape[0]
        and key.shape[1] == value.shape[1]
        and query.shape[1] % key.shape[1] == 0
    )


def _efficient_applies(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    operands = (query, key, value)
    # The kernel reads 16 bytes at a time.
    num_aligned = 16 // query.dtype.itemsize
    return (
        query.dtype in (*_FLASH_DTYPES, torch.float32)
        and query.shape[-1] % num_aligned == 0
        and all(t.ndim == 4 and t.shape[-1] == query.shape[-1] for t in operands)
        and all(t.shape[:2] == query.shape[:2] for t in operands)
        and (mask is None or mask.dtype in (torch.bool, query.dtype))
    )


def _repeated(heads: Tensor, query: Tensor) -> Tensor:
    """Repeat each key/value head for its `query heads / heads` consecutive query heads (grouped-query attention)."""
    return heads.repeat_interleave(query.shape[-3] // heads.shape[-3], -3)


OPERATIONS = (
    Operation(
        name="attention",
        functions=(F.scaled_dot_product_attention,),
        run=scaled_dot_product_attention,
        kernels=(cuda_flash, cuda_cudnn, cuda_efficient),
    ),
)
