"""Joins the nodes of each `torch.vmap` of a captured graph into one call, which then runs as torch's own operators.

Dynamo captures a vmap as its parts, which mean nothing one by one: what begins it, the operations on tensors without
their batch dim, and what ends it. Masks of transformers are made so, and associative scans.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch

from thunder_memsave.frontend.higher_order import REGION

_BEGINS, _ENDS = predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting
_OF_THE_FIRST = ("stack_trace", "nn_module_stack", REGION)
"""Keys in a node's meta that hold for all of a vmap."""


def join_vmaps(graph: fx.GraphModule) -> None:
    """Replace each outermost vmap by one node whose function is all of it; its results are picked from a tuple."""
    for nodes in _vmaps(graph.graph):
        _join(graph, nodes)


def _vmaps(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes of each outermost vmap."""
    found: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is _BEGINS:
            if depth == 0:
                found.append([])
            depth += 1
        if depth and node.op != "get_attr":
            found[-1].append(node)
        if node.target is _ENDS:
            depth -= 1
    return found


def _join(graph: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
    inside = set(nodes)
    inputs = list(
        dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    )
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    body = fx.Graph()
    copies = {node: body.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in outputs))
    with graph.graph.inserting_after(nodes[-1]):
        joined = graph.graph.call_function(_function(body), tuple(inputs))
    joined.meta = {key: nodes[0].meta[key] for key in _OF_THE_FIRST if key in nodes[0].meta}
    joined.meta["example_value"] = tuple(node.meta["example_value"] for node in outputs)
    last = joined
    for index, node in enumerate(outputs):
        with graph.graph.inserting_after(last):
            last = graph.graph.call_function(operator.getitem, (joined, index))
        last.meta = {**joined.meta, "example_value": node.meta["example_value"]}
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.graph.erase_node(node)


def _function(body: fx.Graph) -> Callable[..., Any]:
    module = fx.GraphModule({}, body)

    def vmap(*tensors: Any) -> Any:
        depth = _depth()
        try:
            return fx.Interpreter(module).run(*tensors)
        finally:
            while _depth() > depth:  # an error left it open
                _ENDS()

    vmap.__module__ = "torch"
    return vmap


def _depth() -> int:
    return len(torch._C._functorch.get_interpreter_stack() or ())
