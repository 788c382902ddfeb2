"""Lets a graph of ATen operators read a value itself where it was copied into memory of which nothing else is read.

PyTorch's trace of a write to a part of a tensor, `h[:, i] = x`, and the backward of one (`CopySlices`) make such
copies, each as large as the tensor in backward: for a loop over tokens as many as it has tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from thunder_memsave.aten.round_trips import reads_numbers_alone, value_of

_SCATTERS = (torch.ops.aten.select_scatter.default, torch.ops.aten.slice_scatter.default)
"""They read their second argument, and do not care where it lies."""


def skip_repeated_copies(graph: fx.Graph) -> None:
    """Change `graph` so that no operator reads a copy with the shape, type and strides of what was copied.

    What is written into a part of a tensor may have other strides. What the graph returns stays: its caller may change
    it in place.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        source: Any = node.args[1]
        if not isinstance(source, fx.Node):
            continue
        before, after = value_of(source), value_of(node)
        facts = [(v.shape, v.dtype, v.device, v.layout) for v in (before, after)]
        if facts[0] != facts[1]:
            continue
        lies_alike = before.stride() == after.stride()
        for user in list(node.users):
            is_written = user.target in _SCATTERS and user.args[0] is not node
            if is_written or (lies_alike and _reads_numbers(user)):
                user.replace_input_with(node, source)


def _reads_numbers(node: fx.Node) -> bool:
    """Tell whether a node reads nothing but numbers of what it gets, be it through an alias: torch 2.15 makes some.

    An alias that nothing reads may be what is written to an operand.
    """
    if node.target is torch.ops.aten.alias.default:
        return bool(node.users) and all(map(_reads_numbers, node.users))
    return reads_numbers_alone(node)
