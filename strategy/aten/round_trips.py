"""Lets a graph of ATen operators read a value itself, where it was cast to a wider type and back with the same bits.

An adapter in float32 over a bfloat16 model makes such casts in each linear: peft casts its input up, autocast down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_WIDER = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}
"""The types that have all numbers of a type."""

_BY_PLACE = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)
"""They read the memory around a value too."""


def skip_round_trips(graph: fx.Graph) -> None:
    """Change `graph` so that no operator reads a value that was widened and narrowed again.

    What the graph returns stays: its caller may change it in place.
    """
    for node in graph.nodes:
        if not only_casts(node) or not only_casts(node.args[0]):
            continue
        value = node.args[0].args[0]
        before, between, after = (value_of(n) for n in (value, node.args[0], node))
        is_exact = after.dtype is before.dtype and between.dtype in _WIDER.get(before.dtype, ())
        if is_exact and after.stride() == before.stride():
            node.replace_all_uses_with(value, delete_user_cb=reads_numbers_alone)


def only_casts(node: Any) -> bool:
    """Return whether a node is a cast between real numbers, and nothing else."""
    if not isinstance(node, fx.Node) or node.target is not torch.ops.aten._to_copy.default:
        return False
    before, after = value_of(node.args[0]), value_of(node)
    stays = (before.device, before.layout) == (after.device, after.layout)
    is_real = not (before.is_complex() or after.is_complex())
    return (
        before.dtype is not after.dtype and stays and is_real and "memory_format" not in node.kwargs
    )


def value_of(node: Any) -> Tensor:
    """Return the fake tensor that a node of a traced graph stands for."""
    value: Tensor = node.meta["val"]
    return value


def reads_numbers_alone(user: fx.Node) -> bool:
    """Return whether an operator reads what it is given, and neither returns it nor reads the memory around it."""
    return user.op != "output" and user.target not in _BY_PLACE
