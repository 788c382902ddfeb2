"""Lets a graph return the hidden states in place of logits, which the caller makes of them if they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from thunder_memsave.fp8.compute.late_linear import LateLinear

_IN_FP8 = "in_fp8"


@dataclass(frozen=True, slots=True)
class InFp8:
    """How a linear layer in fp8 runs after the call."""

    linear: LateLinear
    scale: Callable[[], Tensor] | None
    """Returns the scales of its operands; None: its recipe has none."""


@dataclass(frozen=True, slots=True)
class LateNodes:
    """How an output is made after the call."""

    make: fx.GraphModule
    """`(*operands[, scale]) -> output`."""
    operands: tuple[fx.Node, ...]
    """Placeholders, and values that the graph returns."""
    example: Tensor
    """The output, without numbers."""
    scale: Callable[[], Tensor] | None = None
    """Returns the scales of a linear layer in fp8 at the time of the call."""


def may_be_late(linear: fx.Node) -> bool:
    """Return whether a linear layer can run after the call: its weights are inputs of the graph."""
    hidden, *weights = linear.all_input_nodes
    return hidden.op != "placeholder" and all(w.op == "placeholder" for w in weights)


def leave_out(
    graph: fx.GraphModule,
    nodes: Sequence[fx.Node],
    returned: fx.Node,
    in_fp8: InFp8 | None,
) -> dict[int, LateNodes]:
    """Replace an output by the hidden states of its linear layer.

    Args:
        graph: The graph, changed in place.
        nodes: From the linear layer on, each read by the next.
        returned: The one of them that the graph returns.
        in_fp8: How the linear layer runs, if in fp8.

    Returns:
        The outputs that the caller makes, by their index.
    """
    linear = nodes[0]
    late = LateNodes(
        make=_alone(nodes, returned, in_fp8),
        operands=_operands(graph, linear),
        example=returned.meta["example_value"],
        scale=None if in_fp8 is None else in_fp8.scale,
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


def _alone(nodes: Sequence[fx.Node], returned: fx.Node, in_fp8: InFp8 | None) -> fx.GraphModule:
    """Return the nodes up to the returned one, as a function of what the linear layer reads."""
    alone = fx.Graph()
    linear = nodes[0]
    copies = {n: alone.placeholder(f"operand_{i}") for i, n in enumerate(linear.all_input_nodes)}
    modules: dict[str, LateLinear] = {}
    rest = nodes[: nodes.index(returned) + 1]
    if in_fp8 is not None:
        modules[_IN_FP8], rest = in_fp8.linear, rest[1:]
        scale = None if in_fp8.scale is None else alone.placeholder("scale")
        operands = [copies[n] for n in linear.all_input_nodes]
        bias = None if len(operands) < len(("hidden", "weight", "bias")) else operands[2]
        copies[linear] = alone.call_module(_IN_FP8, (*operands[:2], bias, scale))
    for node in rest:
        copies[node] = alone.node_copy(node, copies.__getitem__)
    alone.output(copies[returned])
    return fx.GraphModule(modules, alone)
