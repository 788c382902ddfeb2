"""Finds in-place operations in a captured graph, and refuses those whose effect Thunder would lose.

Thunder makes in-place operations functional, but a change made through one view does not reach other views of the same
storage: the result would silently differ from eager's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.fx_nodes import example_values, value_needs_grad, where

_IN_PLACE_OPERATORS = frozenset(
    {
        operator.setitem,
        *(
            getattr(operator, f"i{name}")
            for name in (
                "add",
                "sub",
                "mul",
                "truediv",
                "floordiv",
                "mod",
                "pow",
                "and",
                "or",
                "xor",
            )
        ),
    }
)

_RENORMALISING = (F.embedding, F.embedding_bag)


def changed_operand(node: fx.Node) -> fx.Node | None:
    """Return the tensor that `node` changes in place; None if it changes none."""
    if node.op not in ("call_method", "call_function") or not node.args:
        return None
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    is_operator = (
        getattr(node.target, "__module__", None) == "_operator"
    )  # as `and_`, which changes nothing
    in_place = (
        node.target in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__") and not is_operator)
        or inplace_position(node) is not None
    )
    operand = node.args[0]
    return operand if in_place and isinstance(operand, fx.Node) and storage(operand) else None


def refuse_lost_changes(graph: fx.GraphModule) -> None:
    """Refuse graphs that change a tensor in place and read another view of its storage afterwards.

    Raises:
        CompileError: A change would be lost; the message names the user's line.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        body = operator.attrgetter(node.target)(graph)
        if isinstance(body, fx.GraphModule):
            refuse_lost_changes(body)
    for node in graph.graph.nodes:
        _refuse_other_changes(node)
    for node in lost_changes(graph.graph):
        raise CompileError(
            f"A tensor is changed in place at {where(node)} while another "
            "view of it is used later; Thunder would lose the change. Write the operation out of place."
        )


def lost_changes(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the nodes that change a tensor in place of which another view is read afterwards."""
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        operand = changed_operand(node)
        if operand is None:
            continue
        for other in nodes[: position[node]]:
            if storage(other) != storage(operand) or _origin(other) is _origin(operand):
                continue
            if any(position[user] > position[node] for user in other.users):
                yield node
                break


def refuse_changed_inputs(body: fx.GraphModule, *, what: str) -> None:
    """Refuse bodies of higher-order operators that change a tensor from outside of them.

    Thunder would lose a change in a custom autograd function; eager makes one in a checkpointed region twice.

    Raises:
        CompileError: The body does so; the message names the user's line.
    """
    inputs = {storage(n) for n in body.graph.nodes if n.op == "placeholder"}
    for node in body.graph.nodes:
        operand = changed_operand(node)
        if operand is not None and storage(operand) in inputs:
            raise CompileError(
                f"{what} changes a tensor from outside of it in place (at {where(node)}), which would not have the "
                "effect that it has in eager. Write the operation out of place, or keep it out of the region."
            )


def storage(node: fx.Node) -> Any:
    """Return an identifier of the storage of the node's value; None if it is not a tensor."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _origin(node: fx.Node) -> fx.Node:
    """Return the first operand of a chain of in-place operations, each of which returns its operand."""
    changed = changed_operand(node)
    return node if changed is None else _origin(changed)


def inplace_position(node: fx.Node) -> int | str | None:
    """Return the position or the name of the argument `inplace=True` of `node`; None if it has none."""
    if node.kwargs.get("inplace") is True:
        return "inplace"
    code = getattr(node.target, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    position = names.index("inplace") if "inplace" in names else len(node.args)
    return position if position < len(node.args) and node.args[position] is True else None


def _refuse_other_changes(node: fx.Node) -> None:
    """Refuse nodes that change an operand other than the first."""
    if node.kwargs.get("out") is not None:
        raise CompileError(
            f"The result is written to out= at {where(node)}; Thunder would lose it. Use the returned tensor instead."
        )
    _refuse_statistics(node)
    if _is_renormalised(node):
        _refuse_renormalised(node)


def refuse_unseen_changes(graph: fx.GraphModule) -> None:
    """Refuse changes in place that no operator's schema shows, and those of trained weights by `max_norm`.

    Raises:
        CompileError: The graph makes one; the message names the user's line.
    """
    for node in graph.graph.nodes:
        _refuse_statistics(node)
        if _is_renormalised(node) and any(
            map(value_needs_grad, example_values(node.all_input_nodes))
        ):
            _refuse_renormalised(node)


def _refuse_statistics(node: fx.Node) -> None:
    statistics = (*node.args[1:3], node.kwargs.get("running_mean"))
    if node.target is F.instance_norm and any(isinstance(s, fx.Node) for s in statistics):
        raise CompileError(
            f"instance_norm updates running statistics at {where(node)}; Thunder would lose the update. Use "
            "track_running_stats=False, or batch_norm."
        )


def _is_renormalised(node: fx.Node) -> bool:
    return node.target in _RENORMALISING and _argument(node, 3, "max_norm") is not None


def _refuse_renormalised(node: fx.Node) -> None:
    raise CompileError(
        f"The embedding at {where(node)} has max_norm, which changes its weight in place in forward; compiled "
        "code would lose the change. Leave max_norm out, and at first and after each optimizer step call "
        "`p.data.copy_(torch.renorm(p.data, norm_type, 0, max_norm))` for the embedding's weight p."
    )


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def refuse_changed_weights(graph: fx.GraphModule, weights: Mapping[fx.Node, str]) -> None:
    """Refuse graphs that change a trained parameter in place.

    Args:
        graph: The captured graph.
        weights: Names of the trained parameters, by placeholder.

    Raises:
        CompileError: The graph does so; the message names the user's line.
    """
    names = {storage(node): name for node, name in weights.items()}
    for node in graph.graph.nodes:
        operand = changed_operand(node)
        name = None if operand is None else names.get(storage(operand))
        if name is not None:
            raise CompileError(
                f"The forward changes the parameter {name!r} in place (at {where(node)}), and compiled code would "
                "compute no gradient for it. Make it a buffer, freeze it, or change it outside of the compiled "
                "forward, inside `with torch.no_grad(), fabric.strategy.summon_full(model, writeback=True):`."
            )
