"""Says whether PyTorch prefers cuDNN's attention on the GPU that a trace is for, as its own attention would choose.

With the GPU here, PyTorch is asked, so that its settings count (`torch.nn.attention.sdpa_kernel`,
`torch.backends.cuda`). A plan for an absent GPU follows the rules of torch 2.11 to 2.13
(transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention` and `can_use_cudnn_attention`), and takes cuDNN to be
one of those that are preferred, 9.15.1 or newer, as in their CUDA 13 wheels.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from thunder_memsave.ops.cuda_device import Capability, capability_of, device_of, is_here

_FIRST_PREFERRED = 91500
_FIRST_WIDE = 91000
_FEW_TOKENS = 16
_USUAL_ORDER = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")


def prefers_cudnn(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> bool:
    """Return whether PyTorch runs attention without a mask and without dropout by cuDNN, with gradients.

    Args:
        query: (rows, heads, length, width) on CUDA.
        key: As `query`, perhaps with fewer heads.
        value: As `key`.
        is_causal: Whether attention is causal.
    """
    if is_here():
        return _choice(query, key, value, is_causal=is_causal) == SDPBackend.CUDNN_ATTENTION
    capability = capability_of(query.device.index)
    return _is_first(capability) and _takes(query, key, capability)


def _choice(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> SDPBackend:
    """Ask PyTorch about small tensors of the same heads, on the GPU: of FakeTensors it says that it takes none.

    It looks at heads, dtypes, settings and the GPU, at no numbers, and of lengths at those of one token alone.
    """
    ask: Any = torch._fused_sdp_choice
    with _disable_current_modes(), torch.enable_grad():
        small = [
            torch.empty(
                (1, t.shape[1], min(t.shape[2], _FEW_TOKENS), t.shape[3]),
                dtype=t.dtype,
                device=device_of(t),
                requires_grad=True,
            )
            for t in (query, key, value)
        ]
        shares_keys = query.shape[1] != key.shape[1]
        number = ask(*small, None, 0.0, is_causal, enable_gqa=shares_keys)
    return SDPBackend(number)


def _is_first(capability: Capability) -> bool:
    """Return whether cuDNN comes first: on data-centre GPUs from Hopper on, or where the user puts it."""
    order = [SDPBackend(n).name for n in torch._C._get_sdp_priority_order()]
    if tuple(order[: len(_USUAL_ORDER)]) != _USUAL_ORDER:
        return order.index("CUDNN_ATTENTION") < order.index("FLASH_ATTENTION")
    is_put_last = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return not is_put_last and capability[0] in (9, 10) and _cudnn_version() > _FIRST_PREFERRED


def _takes(query: Tensor, key: Tensor, capability: Capability) -> bool:
    is_wide = capability == (9, 0) and _cudnn_version() >= _FIRST_WIDE
    width = query.shape[-1]
    return (
        torch.backends.cuda.cudnn_sdp_enabled()
        and not _must_repeat_bits()
        and query.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= (256 if is_wide else 128)
        and key.shape[-2] > 1
        and capability >= (8, 0)
    )


def _must_repeat_bits() -> bool:
    """Return whether only deterministic kernels may run, of which cuDNN's attention is none."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warns


def _cudnn_version() -> int:
    """Return the number of cuDNN here, such as 91900; of a build of PyTorch without it, the first that is preferred."""
    return torch.backends.cudnn.version() or _FIRST_PREFERRED + 1
