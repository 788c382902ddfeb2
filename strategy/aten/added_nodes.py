"""Adds nodes to a graph without going through their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx


def add_node(
    graph: fx.Graph,
    model: fx.Node,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    meta: Mapping[str, Any],
) -> fx.Node:
    """Add a node that calls what another one calls, at the insert point of the graph.

    From torch 2.13 on, `Graph.create_node` flattens the arguments to warn of symbolic numbers: more than half of its
    time. They are given later here.

    Args:
        graph: Gets the node.
        model: Calls the same, with other arguments.
        args: Nodes, and constants that are not symbolic.
        kwargs: The same, by name.
        meta: What is known of the node.
    """
    node = graph.create_node(model.op, model.target, name=model.name, type_expr=model.type)
    node.args = args
    if kwargs:
        node.kwargs = kwargs
    node.meta.update(meta)  # to set any attribute takes the node out of a table and puts it back
    return node
