"""Finds which keys a mask allows each query, as one interval, without making the mask.

Comparisons of a vector of queries with a sorted vector of keys, and their conjunctions, allow an interval each:

    keys = arange(8)[None, :]
    queries = arange(8)[:, None]
    mask = (keys <= queries) & (keys > queries - 3)      # [max(0, i - 2), i + 1) for query i

That is how transformers writes causal masks, windows and documents. A mask of 131,072 tokens would take 16 GiB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from thunder_memsave.frontend.rewrites.nodes import shape_of, torch_call

_SAME = {"to", "bool", "contiguous", "clone", "expand", "expand_as"}
_BOTH = {"and", "bitwise_and", "logical_and"}
_FLIPPED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq"}


class Intervals(NamedTuple):
    """The keys of each query, from `first` up to but not including `end`; both end in the dimension of queries."""

    first: Tensor
    end: Tensor

    def window(self) -> int | None:
        """Return how many keys each query has up to its own; None if they are others, or their number differs."""
        ends = torch.arange(1, self.end.shape[-1] + 1)
        size = int(ends[-1] - self.first.flatten()[-1])
        if size < 1 or not (self.end == ends).all():
            return None
        return size if (self.first == (ends - size).clamp_(min=0)).all() else None


def intervals(
    mask: Any, length: int, *, is_known: Callable[[fx.Node], bool], value: Callable[[fx.Node], Any]
) -> Intervals | None:
    """Return the intervals of a boolean mask of (`length`, `length`); None: it has others, or depends on data.

    Args:
        mask: The node, or another operand of a conjunction.
        length: The number of queries, and of keys.
        is_known: Whether a node is a function of its operands alone, which nothing changes later.
        value: Returns a node's tensor, of few elements; None if it depends on data.
    """

    def found(node: Any) -> Intervals | None:
        if not isinstance(node, fx.Node) or not _is_bool(node) or not is_known(node):
            return None
        if shape_of(node) == ():
            return _all_or_none(value(node), length)
        call = torch_call(node)
        if call is None or length < 2 or shape_of(node)[-2:] != (length, length):
            return None
        name = call.name.strip("_")  # torch 2.11 captures `a == b` as the method `__eq__`
        if name in _SAME:
            return found(call.args[0])
        if name in _BOTH and len(call.args) == 2:
            return _intersection(*map(found, call.args))
        if name in _FLIPPED and len(call.args) == 2:
            return _of_comparison(name, *call.args, length=length, value=value)
        return None

    return found(mask)


def _is_bool(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and example.dtype is torch.bool


def _all_or_none(value: Tensor | None, length: int) -> Intervals | None:
    if value is None:
        return None
    return Intervals(torch.zeros(1, dtype=torch.int64), torch.tensor([length * int(value)]))


def _intersection(one: Intervals | None, other: Intervals | None) -> Intervals | None:
    if one is None or other is None:
        return None
    return Intervals(torch.maximum(one.first, other.first), torch.minimum(one.end, other.end))


def _of_comparison(
    name: str, left: Any, right: Any, *, length: int, value: Callable[[fx.Node], Any]
) -> Intervals | None:
    """Return the keys for which `left name right` is true, where one is a vector of queries, and one of keys."""
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    if shape_of(right)[-1:] == (length,):
        name, left, right = _FLIPPED[name], right, left
    if shape_of(right)[-2:] != (length, 1) or shape_of(left)[-2:] not in ((1, length), (length,)):
        return None
    keys, queries = value(left), value(right)
    if keys is None or queries is None or keys.is_floating_point() or queries.is_floating_point():
        return None
    keys, queries = keys.long(), queries.squeeze(-1).long()
    keys = keys.squeeze(-2) if keys.dim() > 1 else keys
    if not (keys.diff() >= 0).all():
        return None
    leading = torch.broadcast_shapes(keys.shape[:-1], queries.shape[:-1])
    keys, queries = (each.expand(*leading, length).contiguous() for each in (keys, queries))
    before = torch.searchsorted(keys, queries)  # keys below the query
    up_to = torch.searchsorted(keys, queries, right=True)
    none, all_ = torch.zeros_like(before), torch.full_like(before, length)
    return {
        "le": Intervals(none, up_to),
        "lt": Intervals(none, before),
        "ge": Intervals(before, all_),
        "gt": Intervals(up_to, all_),
        "eq": Intervals(before, up_to),
    }[name]
