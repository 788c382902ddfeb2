"""Writes `f(x, out=y)` as `y.copy_(f(x))`, which is how Thunder knows a change in place: spectral norms do so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx


def split_out_arguments(graph: fx.GraphModule) -> None:
    """Compute elsewhere what is written to `out=`, and copy it, where shape and dtype are those of the result."""
    for node in list(graph.graph.nodes):
        out = node.kwargs.get("out")
        if isinstance(out, fx.Node) and _is_alike(node, out):
            _split(graph.graph, node, out)


def _is_alike(node: fx.Node, out: fx.Node) -> bool:
    ours, other = node.meta.get("example_value"), out.meta.get("example_value")
    if not isinstance(ours, Tensor) or not isinstance(other, Tensor):
        return False
    return (ours.shape, ours.dtype, ours.device) == (other.shape, other.dtype, other.device)


def _split(graph: fx.Graph, node: fx.Node, out: fx.Node) -> None:
    example: Any = node.meta["example_value"]
    kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
    with graph.inserting_before(node):
        computed = graph.create_node(node.op, node.target, node.args, kwargs)
        copied = graph.call_method("copy_", (out, computed))
    with example.fake_mode:
        computed.meta = {**node.meta, "example_value": torch.empty_like(example)}
    copied.meta = dict(node.meta)
    node.replace_all_uses_with(copied)
    graph.erase_node(node)
