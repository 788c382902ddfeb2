"""Finds the inputs that each output of a captured graph is differentiable in, by eager PyTorch's rules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from thunder_memsave.frontend.aliasing import changed_operand, storage
from thunder_memsave.frontend.fx_nodes import value_needs_grad

_NONE: frozenset[int] = frozenset()


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
        operands = frozenset().union(*(reached.get(n, _NONE) for n in node.all_input_nodes))
        reached[node] = operands if _needs_grad(node) else _NONE
        if (changed := changed_operand(node)) is not None:
            # Every view of the changed memory depends on the operands from here on.
            for other in [n for n in reached if storage(n) == storage(changed)]:
                reached[other] |= operands
    return tuple(reached.get(o, _NONE) if _needs_grad(o) else _NONE for o in outputs)


def _needs_grad(node: fx.Node) -> bool:
    return value_needs_grad(node.meta.get("example_value"))
