"""Writes `f(x, out=y)` as `y.copy_(f(x))`, which is how Thunder knows a change in place: spectral norms do so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from thunder_memsave.frontend.fx_nodes import node_callable


def split_out_arguments(graph: fx.GraphModule) -> None:
    """Compute elsewhere what is written to `out=`, and copy it, where shape and dtype are those of the result."""
    for node in list(graph.graph.nodes):
        out = node.kwargs.get("out")
        if not isinstance(out, fx.Node) or not isinstance(node.meta.get("example_value"), Tensor):
            continue
        computed = _computed(node)
        if _is_alike(computed, node.meta["example_value"]):
            _split(graph.graph, node, out, computed)


def _computed(node: fx.Node) -> Tensor:
    """Return what the node's function returns without `out=`, a fake tensor."""

    def example(argument: fx.Node) -> Any:
        return argument.meta["example_value"]

    args: Any = fx.node.map_arg(node.args, example)
    kwargs: Any = fx.node.map_arg(_without_out(node), example)
    with node.meta["example_value"].fake_mode, torch.no_grad():
        return node_callable(node)(*args, **kwargs)  # type: ignore[no-any-return]


def _without_out(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.kwargs.items() if key != "out"}


def _is_alike(ours: Tensor, other: Tensor) -> bool:
    return (ours.shape, ours.dtype, ours.device) == (other.shape, other.dtype, other.device)


def _split(graph: fx.Graph, node: fx.Node, out: fx.Node, example: Tensor) -> None:
    with graph.inserting_before(node):
        computed = graph.create_node(node.op, node.target, node.args, _without_out(node))
        copied = graph.call_method("copy_", (out, computed))
    computed.meta = {**node.meta, "example_value": example}
    copied.meta = dict(node.meta)
    node.replace_all_uses_with(copied)
    graph.erase_node(node)
