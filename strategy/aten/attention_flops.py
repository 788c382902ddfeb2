"""Counts the FLOPs of PyTorch's attention operators: those of the positions that attend to each other.

torch's own formulas count the whole square of a causal kernel and of a sliding window, raise for grouped queries
(torch 2.11), and count every document of packed rows as the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_aten = torch.ops.aten

_LENGTH_FIRST = (_aten._flash_attention_forward, _aten._flash_attention_backward)
"""Those whose heads come after the length: (rows, length, heads, width), or (length of all rows, heads, width)."""

ATTENTION = frozenset(
    {
        *_LENGTH_FIRST,
        *(
            getattr(_aten, f"_scaled_dot_product_{kind}{direction}")
            for kind in (
                "flash_attention_for_cpu",
                "flash_attention",
                "efficient_attention",
                "cudnn_attention",
            )
            for direction in ("", "_backward")
        ),
    }
)
"""Operators of which `attention_flops` knows the arguments."""


def attention_flops(operator: Any, given: Mapping[str, Any]) -> int:
    """Return the multiplications and additions of a call: two products forward, five backward.

    Args:
        operator: One of `ATTENTION`.
        given: Its arguments by their names.
    """
    query, key, value = (given[name] for name in ("query", "key", "value"))
    query_width, value_width = query.shape[-1], value.shape[-1]
    # Backward computes the scores again, and the gradients of values, of scores, of queries and of keys.
    is_backward = "logsumexp" in given
    per_pair = 3 * query_width + 2 * value_width if is_backward else query_width + value_width
    pairs: int  # each counts twice
    if operator in _LENGTH_FIRST and query.ndim == 3:
        pairs = query.shape[1] * _pairs_of_documents(given)
    else:
        rows, num = query.shape[0], query.shape[2 if operator in _LENGTH_FIRST else 1]
        length, key_length = (t.shape[1 if operator in _LENGTH_FIRST else 2] for t in (query, key))
        pairs = rows * num * _pairs(length, key_length, given)
    return int(2 * per_pair) * (pairs // 2)


def _pairs(length: int, key_length: int, given: Mapping[str, Any]) -> int:
    """Return twice the pairs of positions that attend to each other: half of the square if causal, less in a window."""
    if not given.get("is_causal"):
        return 2 * length * key_length
    window = _window(given, key_length)
    return window * (2 * length - window) if window < length else length * key_length


def _window(given: Mapping[str, Any], key_length: int) -> int:
    """Return how many keys a query attends to at most."""
    before = given.get("window_size_left")
    return key_length if before is None or before < 0 else min(before + 1, key_length)


def _pairs_of_documents(given: Mapping[str, Any]) -> int:
    """Return `_pairs` of all documents; each is taken to be the longest if there are no numbers."""
    boundaries: Tensor = given["cum_seq_q"]
    if isinstance(boundaries, FakeTensor) or boundaries.is_meta:
        longest, longest_keys = int(given["max_q"]), int(given["max_k"])
        return int(given["query"].shape[0]) * _pairs(longest, longest_keys, given) // longest
    of_keys: Tensor = given["cum_seq_k"]
    lengths = zip(boundaries.diff().tolist(), of_keys.diff().tolist(), strict=True)
    return sum(_pairs(length, key_length, given) for length, key_length in lengths)
