"""Says why a graph cannot be lowered to ATen operators, and at which line of the user's."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._ops import OpOverload

from thunder_memsave.aten.joint_graph import UntraceableError
from thunder_memsave.frontend.aliasing import changed_operand, storage
from thunder_memsave.frontend.fx_nodes import function_name, node_callable, node_needs_grad, where

_ADVICE = "Write it with other operations, or keep it out of the compiled model."


def refusal(graph: fx.GraphModule, failed: fx.Node | None, error: UntraceableError) -> str:
    """Return the message.

    Args:
        graph: The captured graph.
        failed: Its node at which the run ended; None if it ended in the derivative, or afterwards.
        error: What PyTorch says.
    """
    if failed is None and "modified by an inplace operation" in str(error):
        changes = [where(node) for node in _changes_after_a_reader(graph.graph)]
        return (
            f"A tensor is changed in place at {' or '.join(changes) or 'a line unknown'}, after an operation whose "
            "gradient needs its old numbers; eager PyTorch ends there in an error too, in backward, unless a "
            "checkpoint reads it anew. Write the change out of place."
        )
    node = failed if failed is not None else error.node
    what = "The graph"
    if node is not None and node.op in ("call_function", "call_method"):
        what = f"{_name(node)} (at {where(node)})"
    return f"{what} cannot be compiled: PyTorch cannot trace it without numbers: {error}. {_ADVICE}"


def _name(node: fx.Node) -> str:
    return (
        str(node.target)
        if isinstance(node.target, OpOverload)
        else function_name(node_callable(node))
    )


def _changes_after_a_reader(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that change a tensor in place which an operation with a gradient has read."""
    read: set[Any] = set()
    found = []
    for node in graph.nodes:
        operand = changed_operand(node)
        if operand is not None and storage(operand) in read:
            found.append(node)
        if node_needs_grad(node):
            read.update(storage(n) for n in node.all_input_nodes)
    return found
