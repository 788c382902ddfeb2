"""Draws in place fill memory from its begin to its end, whatever the strides; their functional forms must too.

`Tensor.bernoulli_(p)`, which dropout on a CPU calls on a tensor with the strides of its input, draws for a transposed
tensor in the order of its memory. `aten.bernoulli.p`, to which functionalization turns it, draws for a contiguous one.
So the draw is made in place of a view that is contiguous: the same numbers, and the strides of eager PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_aten = torch.ops.aten


def draw_in_memory_order(graph: fx.Graph) -> None:
    """Let each `bernoulli_` of a graph with writes write to a contiguous view of its operand."""
    for node in graph.find_nodes(op="call_function", target=_aten.bernoulli_.float):
        operand = node.args[0]
        assert isinstance(operand, fx.Node), "it draws into a tensor"
        value = operand.meta.get("val")
        if not isinstance(value, Tensor) or (order := _order_in_memory(value)) is None:
            continue
        with graph.inserting_before(node):
            view = graph.call_function(_aten.permute.default, (operand, order))
        view.meta = {**node.meta, "val": value.permute(order)}
        node.args = (view, *node.args[1:])
        node.replace_all_uses_with(operand)


def _order_in_memory(value: Tensor) -> list[int] | None:
    """Return the order of dims in which the tensor is contiguous; None: it is as it is, or never."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    is_changed = not value.is_contiguous() and value.permute(order).is_contiguous()
    return order if is_changed else None
