"""Joins the operations of an RMS norm that is written out into one call of `torch.rms_norm`, with the same bits.

Transformers' models compute it in float32 and round before the weight:

    wide = x.to(torch.float32)
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    result = weight * normalized.to(x.dtype)

becomes `weight * torch.rms_norm(x, (size,), None, eps)`, which saves x and one number per row. A weight of float32
values is part of the call, because nothing is rounded before it. In bfloat16 it is not: `torch.nn.RMSNorm` rounds once,
transformers' models twice (docs/decisions/0016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from thunder_memsave.frontend.aliasing import storage
from thunder_memsave.frontend.rewrites.nodes import (
    TorchCall,
    erase_unused,
    shape_of,
    torch_call,
)

_WIDE = (torch.float32, torch.float64)
_SQUARES: Mapping[str, tuple[int, ...]] = {"pow": (2,), "square": ()}
_CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type", "type_as"})


def join_rms_norms(graph: fx.GraphModule, *, changed: Set[Any]) -> None:
    """Replace the operations of each RMS norm by one call, and erase them.

    Args:
        graph: The graph.
        changed: The storages that it changes in place, from `changed_storages`.
    """
    for node in list(graph.graph.nodes):
        norm = None if node._erased else _norm(node)
        if norm is not None and changed.isdisjoint(map(storage, norm.nodes)):
            _join(norm)


@dataclass(frozen=True)
class _Norm:
    """The operations of a norm without its weight."""

    result: fx.Node
    value: fx.Node
    """The tensor that is normalized, in the dtype in which that is computed."""
    eps: float
    nodes: Sequence[fx.Node]
    """The result, the value and what is computed between them."""


def _norm(result: fx.Node) -> _Norm | None:
    """Return the norm whose last operation a node is: `value * rsqrt(mean(value ** 2) + eps)`."""
    if (call := _binary(result, "mul")) is None:
        return None
    for other, factor in (call.args, call.args[::-1]):
        if (norm := _of_factors(result, other, factor)) is not None:
            return norm
    return None


def _of_factors(result: fx.Node, other: Any, factor: Any) -> _Norm | None:
    root = torch_call(factor)
    total = _binary(root.args[0], "add") if root is not None and root.name == "rsqrt" else None
    if root is None or total is None or not isinstance(other, fx.Node):
        return None
    means = [a for a in total.args if isinstance(a, fx.Node)]
    numbers = [a for a in total.args if isinstance(a, float | int)]
    if len(means) != 1 or len(numbers) != 1 or (square := _averaged(means[0])) is None:
        return None
    value = _squared(square)
    if value is None or not _is_same(other, value):
        return None
    nodes = [result, factor, root.args[0], means[0], square, value]
    return _Norm(result, value, float(numbers[0]), nodes) if _are_alike(nodes) else None


def _is_same(one: fx.Node, other: fx.Node) -> bool:
    """Return whether two nodes are one tensor; of two casts, each rounds its gradient before they are added up."""
    return one is other or _source(one, only_own=True) is _source(other, only_own=True)


def _are_alike(nodes: Sequence[fx.Node]) -> bool:
    """Return whether all are computed in one wide dtype, with gradients or all without."""
    values = [n.meta.get("example_value") for n in nodes]
    kinds = {(v.dtype, v.requires_grad) if isinstance(v, Tensor) else None for v in values}
    kind, *others = kinds
    return not others and kind is not None and kind[0] in _WIDE


def _binary(node: Any, name: str) -> TorchCall | None:
    call = torch_call(node)
    is_it = call is not None and call.name == name and len(call.args) == 2 and not call.kwargs
    return call if is_it else None


def _averaged(node: fx.Node) -> fx.Node | None:
    """Return x of `x.mean(-1, keepdim=True)`."""
    call = torch_call(node)
    if call is None or call.name != "mean":
        return None
    given = {**dict(zip(("input", "dim", "keepdim"), call.args, strict=False)), **call.kwargs}
    operand = given.pop("input", None)
    if not isinstance(operand, fx.Node) or given.keys() != {"dim", "keepdim"}:
        return None
    last = len(shape_of(operand)) - 1
    dims = given["dim"] if isinstance(given["dim"], tuple | list) else [given["dim"]]
    return operand if list(dims) in ([-1], [last]) and given["keepdim"] is True else None


def _squared(node: fx.Node) -> fx.Node | None:
    """Return x of `x ** 2`; the gradient of `x * x` is a sum in another order."""
    call = torch_call(node)
    if call is None or call.kwargs or not isinstance(call.args[0], fx.Node):
        return None
    return call.args[0] if call.args[1:] == _SQUARES.get(call.name) else None


def _source(node: fx.Node, *, only_own: bool = False) -> fx.Node:
    """Return the tensor that a node casts to a wider dtype or its own, or only to its own; or the node itself."""
    source = _cast(node)
    if source is None:
        return node
    before, after = source.meta["example_value"].dtype, node.meta["example_value"].dtype
    is_wider = before.itemsize < after.itemsize and not only_own
    return _source(source, only_own=only_own) if is_wider or before is after else node


def _cast(node: fx.Node) -> fx.Node | None:
    """Return the floating-point tensor that a node casts; None if it does anything else."""
    call, after = torch_call(node), node.meta.get("example_value")
    if call is None or call.name not in _CASTS or {"copy", "memory_format"} & call.kwargs.keys():
        return None
    source = call.args[0]
    before = source.meta.get("example_value") if isinstance(source, fx.Node) else None
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    is_float = before.is_floating_point() and after.is_floating_point()
    is_alike = (before.device, before.requires_grad) == (after.device, after.requires_grad)
    return source if is_float and is_alike else None


def _join(norm: _Norm) -> None:
    """Let the first node that can take over compute the whole norm."""
    value, results = norm.value, _copies(norm.result)
    dtype = norm.value.meta["example_value"].dtype
    source = _source(value)
    narrow = source.meta["example_value"].dtype
    readers = list({user for result in results for user in result.users}.difference(results))
    if narrow is not dtype and len(readers) == 1 and _is_cast_to(readers[0], narrow):
        _replace(readers[0], source, None, norm.eps)
    elif (weighted := _weighted(readers, results, dtype)) is not None:
        _replace(weighted[0], value, weighted[1], norm.eps)
    else:
        _replace(norm.result, value, None, norm.eps)


def _copies(node: fx.Node) -> list[fx.Node]:
    """Return the node and what casts it to its own dtype, which is the same tensor."""
    found = [node]
    for user in node.users:
        if _cast(user) is node and _is_cast_to(user, node.meta["example_value"].dtype):
            found += _copies(user)
    return found


def _is_cast_to(node: fx.Node, dtype: torch.dtype) -> bool:
    return _cast(node) is not None and node.meta["example_value"].dtype is dtype


def _weighted(
    readers: Sequence[fx.Node], results: Sequence[fx.Node], dtype: torch.dtype
) -> tuple[fx.Node, fx.Node] | None:
    """Return the only reader and the weight by which it multiplies the result, in the same dtype."""
    call = _binary(readers[0], "mul") if len(readers) == 1 else None
    weights = [] if call is None else [a for a in call.args if a not in results]
    if len(weights) != 1 or not isinstance(weights[0], fx.Node):
        return None
    example = weights[0].meta.get("example_value")
    if not isinstance(example, Tensor) or example.dtype is not dtype:
        return None
    return (readers[0], weights[0]) if example.shape == shape_of(results[0])[-1:] else None


def _replace(result: fx.Node, value: fx.Node, weight: fx.Node | None, eps: float) -> None:
    """Let a node call the norm."""
    before = result.all_input_nodes
    result.op, result.target = "call_function", torch.rms_norm
    result.args, result.kwargs = (value, shape_of(value)[-1:], weight, eps), {}
    erase_unused(before)
