"""Counts the FLOPs of PyTorch's attention operators: those of the positions that attend to each other.

torch's own formulas count the whole square of a causal kernel, raise for grouped queries (torch 2.11), and count every
document of packed rows as the longest.
"""

from __future__ import annotations

import math
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
    pairs: int
    if operator in _LENGTH_FIRST and query.ndim == 3:
        pairs = query.shape[1] * _pairs_of_documents(given)
    else:
        rows, *heads_and_length = query.shape[:-1]
        key_length = key.shape[1 if operator in _LENGTH_FIRST else 2]
        pairs = rows * math.prod(heads_and_length) * key_length
    return int(2 * per_pair) * (pairs // 2 if given.get("is_causal") else pairs)


def _pairs_of_documents(given: Mapping[str, Any]) -> int:
    """Count the pairs of positions of the same document; each is taken to be the longest if there are no numbers."""
    boundaries: Tensor = given["cum_seq_q"]
    if isinstance(boundaries, FakeTensor) or boundaries.is_meta:
        return int(given["query"].shape[0]) * int(given["max_k"])
    of_keys: Tensor = given["cum_seq_k"]
    return int((boundaries.diff().long() * of_keys.diff().long()).sum())
