"""Joins nodes of a captured graph into one call of a function, which then runs as torch's own operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.predispatch import _vmap_decrement_nesting

from thunder_memsave.aten.origin import origin


def join(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], *, name: str, copied: Collection[fx.Node] = ()
) -> None:
    """Replace nodes by one, and what others read of them by what is picked from its tuple of results.

    Args:
        graph: The graph, changed in place.
        nodes: All between the first and the last of them, but for `get_attr`.
        name: Of the function, for messages and traces.
        copied: Nodes from before that the function changes: it changes a copy, which is read from then on.
    """
    later = _after(graph.graph, nodes[-1])
    outputs = [n for n in (*copied, *nodes) if any(user in later for user in n.users)]
    if outputs:
        function, inputs = _function(nodes, outputs, name=name, copied=copied)
        with graph.graph.inserting_after(nodes[-1]):
            joined = graph.graph.call_function(function, tuple(inputs))
        results = tuple(node.meta["example_value"] for node in outputs)
        joined.meta = {**origin(nodes[0]), "example_value": results}
        _read_results(graph.graph, joined, outputs, readers=later)
    for node in reversed(nodes):
        graph.graph.erase_node(node)


def _read_results(
    graph: fx.Graph, joined: fx.Node, outputs: Sequence[fx.Node], *, readers: Collection[fx.Node]
) -> None:
    """Let the readers read the results of `joined` in place of these nodes."""
    last = joined
    for index, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (joined, index))
        last.meta = {**joined.meta, "example_value": node.meta["example_value"]}
        node.replace_all_uses_with(last, delete_user_cb=readers.__contains__)


def _after(graph: fx.Graph, node: fx.Node) -> set[fx.Node]:
    nodes = list(graph.nodes)
    return set(nodes[nodes.index(node) + 1 :])


def _function(
    nodes: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    name: str,
    copied: Collection[fx.Node],
) -> tuple[Callable[..., Any], Sequence[fx.Node]]:
    """Return what the nodes do as a function, and the nodes of its arguments."""
    inside = set(nodes)
    read = (n for node in nodes for n in node.all_input_nodes if n not in inside)
    inputs = list(dict.fromkeys(read))
    body = fx.Graph()
    copies = {node: body.placeholder(node.name) for node in inputs}
    copies.update((node, body.call_function(torch.clone, (copies[node],))) for node in copied)
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in outputs))
    return _running(fx.GraphModule({}, body), name), inputs


def _running(module: fx.GraphModule, name: str) -> Callable[..., Any]:
    def run(*tensors: Any) -> Any:
        depth = _num_open_transforms()
        try:
            return fx.Interpreter(module).run(*tensors)
        finally:
            while _num_open_transforms() > depth:  # an error left a vmap open
                _vmap_decrement_nesting()

    run.__name__, run.__module__ = name, "torch"
    return run


def _num_open_transforms() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())
