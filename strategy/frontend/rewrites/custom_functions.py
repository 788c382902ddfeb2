"""Joins what a custom autograd function does in place into one call, in which no change is lost."""

from __future__ import annotations

import operator

from torch import fx

from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.aliasing import changed_operand, refuse_changed_inputs
from thunder_memsave.frontend.fx_nodes import where
from thunder_memsave.frontend.higher_order import HIGHER_ORDER
from thunder_memsave.frontend.rewrites.joined import join


def join_custom_changes(graph: fx.GraphModule) -> None:
    """Make one call of each body of a custom autograd function that changes tensors of its own in place.

    Thunder makes changes in place functional before it differentiates, and would lose those of a backward.

    Raises:
        CompileError: A body changes what it is given, or changes tensors and calls another custom function.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        body = operator.attrgetter(node.target)(graph)
        if isinstance(body, fx.GraphModule):
            refuse_changed_inputs(body, what="A custom autograd function")
            join_custom_changes(body)
            _join_changes(body)


def _join_changes(body: fx.GraphModule) -> None:
    nodes = [n for n in body.graph.nodes if n.op in ("call_function", "call_method")]
    if not any(changed_operand(n) is not None for n in nodes):
        return
    for node in nodes:
        if node.target in HIGHER_ORDER:
            raise CompileError(
                f"A custom autograd function changes a tensor in place and calls another one (at {where(node)}). "
                "Change a copy out of place, such as `y = y.add(x)`."
            )
    join(body, nodes, name="custom_function")
