"""CUDA's flash kernels on the CPU, by what their documentation says of them.

Of a query at position i, `window_size_left` and `window_size_right` are how many keys before and after i it attends to,
both included, none being a limit where they are negative (github.com/Dao-AILab/flash-attention, README).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `aten._flash_attention_forward` and its derivative on the CPU."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)


def band(length: int, window: int | None) -> Tensor:
    """Return where a position may attend to: itself and those before it, `window` in all."""
    past = torch.ones(length, length, dtype=torch.bool).tril()
    return past if window is None else past.triu(1 - window)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    same: Tensor | None,
    longest: int,
    longest_key: int,
    dropout_p: float,
    is_causal: bool,
    debug: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """Attend as the kernel does: (rows, length, heads, width), or documents one after the other."""
    assert (longest, dropout_p, is_causal, debug) == (longest_key, 0.0, True, False)
    assert window_size_right in (None, 0)
    window = None if window_size_left is None else window_size_left + 1
    if starts is None:
        assert longest == query.shape[1]
        output = _attend(query, key, value, window, scale)
        return output, query.new_zeros((*query.shape[:1], query.shape[2], query.shape[1]))
    assert same is not None
    assert torch.equal(starts, same)
    assert starts.dtype is torch.int32
    output = torch.full_like(query, torch.nan)  # which nobody wrote
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if start < end:
            q, k, v = (t[None, start:end] for t in (query, key, value))
            output[start:end] = _attend(q, k, v, window, scale)[0]
    return output, query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    mask = band(query.shape[1], window)
    attended = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


def flash_backward(grad: Tensor, *arguments: Any, **options: Any) -> Any:
    """Differentiate `flash_forward`, which it runs again."""
    *heads, _output, logsumexp, starts, same, long, longest, dropout_p, is_causal, _, _ = arguments
    num_heads, num_positions = heads[0].shape[-2], heads[0].shape[:-2].numel()
    assert logsumexp.numel() == num_heads * num_positions
    leaves = [t.detach().clone().requires_grad_() for t in heads]
    settings = (starts, same, long, longest, dropout_p, is_causal, False)
    with torch.enable_grad():
        again = flash_forward(leaves[0], leaves[1], leaves[2], *settings, **options)[0]
    return torch.autograd.grad(again, leaves, grad)
