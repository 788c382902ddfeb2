"""Joins operations in place through views of one tensor into one call, in which no change is lost.

Thunder makes operations in place functional, but a change made through one view does not reach other views:

    keys = x.new_empty(4, 8)
    keys[:, :6].copy_(a)
    keys[:, 6:].copy_(b)

is one function of `a` and `b` instead, which returns `keys`. PyTorch makes it functional for all views.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, fx

from thunder_memsave.frontend.aliasing import changed_operand, lost_changes, storage
from thunder_memsave.frontend.higher_order import HIGHER_ORDER
from thunder_memsave.frontend.rewrites.joined import join

_MAKERS = ("empty", "zeros", "ones", "full")
"""Parts of the names of functions that make a tensor of no other's numbers: they are joined, too."""


def join_view_writes(graph: fx.GraphModule) -> None:
    """Join what changes a value of the graph through views, where Thunder would lose it.

    Linear layers, other packages' regions and autocast contexts are never joined, as they are lowered in ways of their
    own: what lies between such changes stays, and is refused.
    """
    for _ in range(len(graph.graph.nodes)):
        region = next(_regions(graph.graph), None)
        if region is None:
            return
        base, nodes = region
        join(graph, nodes, name="in_place_views", copied=() if base in nodes else (base,))


def _regions(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield, for tensors whose changes would be lost, the node that makes it and the nodes to join."""
    nodes = list(graph.nodes)
    for changing in lost_changes(graph):
        memory = storage(changed_operand(changing))  # type: ignore[arg-type]
        views = [n for n in nodes if storage(n) == memory]
        base = views[0]
        if base.op in ("placeholder", "get_attr"):
            continue
        last = [i for i, n in enumerate(nodes) if _changes(n, memory)][-1]
        first = nodes.index(base) + (not _is_made_anew(base))
        region = [n for n in nodes[first : last + 1] if n.op != "get_attr"]
        if all(map(_can_join, region)):
            yield base, region


def _changes(node: fx.Node, memory: object) -> bool:
    operand = changed_operand(node)
    return operand is not None and storage(operand) == memory


def _is_made_anew(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    return any(part in name for part in _MAKERS)


def _can_join(node: fx.Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    own = node.target is F.linear or node.target in HIGHER_ORDER or "autocast" in str(node.target)
    writes_elsewhere = (
        operand := changed_operand(node)
    ) is not None and operand.op == "placeholder"
    makes = isinstance(node.meta.get("example_value"), Tensor | tuple | list | None)
    return is_call and makes and not own and not writes_elsewhere
