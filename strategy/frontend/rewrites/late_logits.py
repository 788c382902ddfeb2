"""Lets a graph return the hidden states in place of logits, which the caller makes of them if they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx


@dataclass(frozen=True, slots=True)
class LateNodes:
    """How an output is made after the call."""

    make: fx.GraphModule
    """`(*operands) -> output`."""
    operands: tuple[fx.Node, ...]
    """Placeholders, and values that the graph returns."""
    example: Tensor
    """The output, without numbers."""


def may_be_late(linear: fx.Node) -> bool:
    """Return whether a linear layer can run after the call: its weights are inputs of the graph."""
    hidden, *weights = linear.all_input_nodes
    return hidden.op != "placeholder" and all(w.op == "placeholder" for w in weights)


def leave_out(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], returned: fx.Node
) -> dict[int, LateNodes]:
    """Replace an output by the hidden states of its linear layer.

    Args:
        graph: The graph, changed in place.
        nodes: From the linear layer on, each read by the next.
        returned: The one of them that the graph returns.

    Returns:
        The outputs that the caller makes, by their index.
    """
    linear = nodes[0]
    late = LateNodes(
        _alone(nodes, returned), _operands(graph, linear), returned.meta["example_value"]
    )
    output = graph.graph.output_node()
    outputs = tuple(output.args[0])  # type: ignore[arg-type]
    output.args = (tuple(late.operands[0] if o is returned else o for o in outputs),)
    return {index: late for index, o in enumerate(outputs) if o is returned}


def _operands(graph: fx.GraphModule, linear: fx.Node) -> tuple[fx.Node, ...]:
    """Return what the linear layer reads; its hidden states without their derivative."""
    hidden, *weights = linear.all_input_nodes
    with graph.graph.inserting_after(hidden):
        detached = graph.graph.call_method("detach", (hidden,))
    detached.meta = {**hidden.meta, "example_value": hidden.meta["example_value"].detach()}
    return detached, *weights


def _alone(nodes: Sequence[fx.Node], returned: fx.Node) -> fx.GraphModule:
    """Return the nodes up to the returned one, as a function of what the linear layer reads."""
    alone = fx.Graph()
    linear = nodes[0]
    copies = {n: alone.placeholder(f"operand_{i}") for i, n in enumerate(linear.all_input_nodes)}
    for node in nodes[: nodes.index(returned) + 1]:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(copies[returned])
    return fx.GraphModule({}, alone)
