"""Assembles the outputs of a captured graph, and finds the inputs that each is differentiable in.

Outputs are computed values, inputs returned unchanged, and plain Python values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from torch import Tensor, fx

from thunder_memsave.frontend.aliasing import changed_operand, storage
from thunder_memsave.frontend.fx_nodes import UNREACHED, value_needs_grad

_NONE: frozenset[int] = frozenset()


def graph_outputs(
    graph: fx.GraphModule, *, as_they_are: Collection[fx.Node]
) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]]:
    """Return the outputs in order, and the computed nodes among them, each once.

    Args:
        graph: The captured graph.
        as_they_are: The inputs that are returned without a computation; the others are gathered first.
    """
    outputs = tuple(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    computed = (o for o in outputs if isinstance(o, fx.Node) and o not in as_they_are)
    return outputs, tuple(dict.fromkeys(computed))


@dataclass(frozen=True, slots=True)
class OutputOrder:
    """Puts the computed values and the inputs returned unchanged into the graph's order."""

    order: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, graph: fx.GraphModule, outputs: Sequence[Any], computed: Sequence[fx.Node]) -> Self:
        """Record the order of `outputs`; `computed` are the nodes that the trace returns."""
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        position = {n: ("input", i) for i, n in enumerate(inputs)}
        position.update({n: ("computed", i) for i, n in enumerate(computed)})
        return cls(tuple(position[o] if isinstance(o, fx.Node) else ("value", o) for o in outputs))

    def __call__(self, inputs: Sequence[Tensor], computed: Sequence[Any]) -> Sequence[Any]:
        """Return the graph's outputs from its inputs and the computed values."""
        sources = {"input": inputs, "computed": computed}
        return [value if kind == "value" else sources[kind][value] for kind, value in self.order]


def distinct_values() -> Callable[[Any], Any]:
    """Return a function that copies a repeated output: each needs a gradient of its own.

    For example, `y` and `y.float()` of a float32 tensor are one proxy.
    """
    seen: set[str] = set()

    def distinct(value: Any) -> Any:
        if isinstance(value, TensorProxy) and value.name in seen:
            return prims.shallow_copy(value)
        seen.add(getattr(value, "name", ""))
        return value

    return distinct


def output_dependencies(
    graph: fx.GraphModule, outputs: Sequence[fx.Node]
) -> tuple[frozenset[int], ...]:
    """Return, for each of `outputs`, the indices of the placeholders that autograd would reach from it.

    A node whose value needs no gradient in eager (`node.meta["example_value"]`) reaches nothing. An in-place operation
    adds what its operands reach to the tensor that it changes.
    """
    reached: dict[fx.Node, frozenset[int]] = {}
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for index, node in enumerate(placeholders):
        reached[node] = frozenset({index}) if _needs_grad(node) else _NONE
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        read = [n for n in node.all_input_nodes if n not in node.meta.get(UNREACHED, ())]
        operands = frozenset().union(*(reached.get(n, _NONE) for n in read))
        reached[node] = operands if _needs_grad(node) else _NONE
        if (changed := changed_operand(node)) is not None:
            # Every view of the changed memory depends on the operands from here on.
            for other in [n for n in reached if storage(n) == storage(changed)]:
                reached[other] |= operands
    return tuple(reached.get(o, _NONE) if _needs_grad(o) else _NONE for o in outputs)


def _needs_grad(node: fx.Node) -> bool:
    return value_needs_grad(node.meta.get("example_value"))
