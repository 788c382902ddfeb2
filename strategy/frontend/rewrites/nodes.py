"""Reads from a node what the rewrites need: the call that it is, its shape, whether it changes anything."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from thunder_memsave.frontend.aliasing import changed_operand, storage
from thunder_memsave.frontend.opaque import is_random
from thunder_memsave.ops.families.counted_targets import COUNTED_TARGETS
from thunder_memsave.ops.families.packed_attention import PACKED_MASK


class TorchCall(NamedTuple):
    """A call of torch's own function or method, whichever way it is written."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def torch_call(node: Any) -> TorchCall | None:
    """Return the call that a node makes; None if it makes another than of torch, or is no node."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    name = str(getattr(node.target, "__name__", node.target))
    is_torchs = node.op == "call_method" or any(
        getattr(module, name, None) is node.target for module in (torch, operator)
    )
    return TorchCall(name, tuple(node.args), dict(node.kwargs)) if is_torchs else None


def is_pure(node: fx.Node) -> bool:
    """Return whether it is one of torch's own functions or methods, which does nothing but return a value."""
    if node.target in (PACKED_MASK, COUNTED_TARGETS):
        return True
    call = torch_call(node)
    if call is None or changed_operand(node) is not None:
        return False
    return "empty" not in call.name and isinstance(node.meta.get("example_value"), Tensor)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor; empty if it is none."""
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def reshaped(graph: fx.Graph, operand: Any, shape: tuple[int, ...]) -> fx.Node:
    """Add a reshape to the graph."""
    return graph.call_function(torch.reshape, (operand, shape))


def changed_storages(graph: fx.GraphModule) -> frozenset[Any]:
    """Return the storages that the graph changes in place, as `aliasing.storage` identifies them."""
    changed = (changed_operand(node) for node in graph.graph.nodes)
    return frozenset(storage(node) for node in changed if node is not None)


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erase those that nobody reads, and then what only they read."""
    for node in _unread(nodes):
        operands = node.all_input_nodes
        node.graph.erase_node(node)
        erase_unused(operands)


def _unread(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        if not node._erased and not node.users and is_pure(node) and not is_random(node):
            yield node
