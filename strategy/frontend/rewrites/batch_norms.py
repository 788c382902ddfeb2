"""Splits BatchNorm in training from the update of its running statistics.

`batch_norm(x, mean, var, ...)` is written as

    y, new_mean, new_var = updating_batch_norm(x, mean.clone(), var.clone(), ...)
    mean.copy_(new_mean)
    var.copy_(new_var)

The function is PyTorch's own kernel with its derivative (docs/decisions/0018), which changes nothing that it is given.
A plan may compute it again, of the clones; the copies run once, in forward.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_SIGNATURE = inspect.signature(F.batch_norm)
_STATISTICS = ("running_mean", "running_var")


def updating_batch_norm(
    value: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `F.batch_norm` in training, and the new running statistics, with eager's bits.

    Args:
        value: (N, C, ...), of any floating-point dtype.
        running_mean: (C,), as are all below.
        running_var: Of the unbiased variances.
        weight: Factors; None: 1.
        bias: Summands; None: 0.
        momentum: The share of the batch in the new statistics.
        eps: Added to the variance.
    """
    statistics = (running_mean, running_var)
    if weight is None or bias is None:  # what chooses cuDNN has no derivative for these
        run = torch.ops.aten._native_batch_norm_legit_functional
        y, _, _, *new = run(value, weight, bias, *statistics, True, momentum, eps)
    else:
        update = torch.ops.aten._batch_norm_with_update_functional
        y, _, _, _, *new = update(value, weight, bias, *statistics, momentum, eps)
    mean, var = new
    return y, mean.detach(), var.detach()


def split_batch_norms(graph: fx.GraphModule) -> None:
    """Split each that updates running statistics."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is F.batch_norm:
            given = _SIGNATURE.bind(*node.args, **node.kwargs)
            given.apply_defaults()
            if given.arguments["training"] and given.arguments["running_mean"] is not None:
                _split(graph.graph, node, given.arguments)


def _split(graph: fx.Graph, node: fx.Node, given: dict[str, Any]) -> None:
    def made(created: fx.Node, value: Any) -> fx.Node:
        created.meta = {**node.meta, "example_value": value}
        return created

    statistics = [given[name] for name in _STATISTICS]
    values = [s.meta["example_value"] for s in statistics]
    others = [given[name] for name in ("weight", "bias", "momentum", "eps")]
    results = (node.meta["example_value"], *values)
    with graph.inserting_before(node):
        pairs = list(zip(statistics, values, strict=True))
        before = [made(graph.call_method("clone", (s,)), v) for s, v in pairs]
        args = (given["input"], *before, *others)
        both = made(graph.call_function(updating_batch_norm, args), results)
        y, *new = [
            made(graph.call_function(operator.getitem, (both, i)), v) for i, v in enumerate(results)
        ]
        for (statistic, value), updated in zip(pairs, new, strict=True):
            made(graph.call_method("copy_", (statistic, updated)), value)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
