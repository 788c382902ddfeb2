"""Joins the nodes of each `torch.vmap` of a captured graph into one call.

Dynamo captures a vmap as its parts, which mean nothing one by one: what begins it, the operations on tensors without
their batch dim, and what ends it. Masks of transformers are made so, and associative scans.
"""

from __future__ import annotations

from torch import fx
from torch._functorch.predispatch import _vmap_decrement_nesting, _vmap_increment_nesting

from thunder_memsave.frontend.rewrites.joined import join


def join_vmaps(graph: fx.GraphModule) -> None:
    """Replace each outermost vmap by one node whose function is all of it."""
    for nodes in _vmaps(graph.graph):
        join(graph, nodes, name="vmap")


def _vmaps(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes of each outermost vmap."""
    found: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is _vmap_increment_nesting:
            if depth == 0:
                found.append([])
            depth += 1
        if depth and node.op != "get_attr":
            found[-1].append(node)
        if node.target is _vmap_decrement_nesting:
            depth -= 1
    return found
