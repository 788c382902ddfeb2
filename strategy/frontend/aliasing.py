"""Finds in-place operations in a captured graph, and refuses those whose effect would be lost."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.capture import GraphInput
from thunder_memsave.frontend.fx_nodes import example_values, value_needs_grad, where
from thunder_memsave.ops.host_copies.weights import place_of

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


def refuse_changed_inputs(body: fx.GraphModule, *, what: str) -> None:
    """Refuse bodies of higher-order operators that change a tensor from outside of them.

    Eager makes such a change twice in a checkpointed region.

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
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)  # inside of vmap
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def inplace_position(node: fx.Node) -> int | str | None:
    """Return the position or the name of the argument `inplace=True` of `node`; None if it has none."""
    if node.kwargs.get("inplace") is True:
        return "inplace"
    code = getattr(node.target, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    position = names.index("inplace") if "inplace" in names else len(node.args)
    return position if position < len(node.args) and node.args[position] is True else None


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
            f"instance_norm updates running statistics at {where(node)}; compiled code would lose the update. Use "
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


def refuse_changed_weights(graph: fx.GraphModule, weights: Mapping[fx.Node, GraphInput]) -> None:
    """Refuse graphs that change a parameter in place which is trained or sharded.

    Args:
        graph: The captured graph.
        weights: These parameters, by placeholder.

    Raises:
        CompileError: The graph does so; the message names the user's line.
    """
    by_storage = {storage(node): weight for node, weight in weights.items()}
    for node in graph.graph.nodes:
        operand = changed_operand(node)
        weight = None if operand is None else by_storage.get(storage(operand))
        if weight is not None:
            why = (
                "the host keeps it (memory.offload_weights), so the change would be lost"
                if place_of(weight.tensor) is not None
                else "compiled code would compute no gradient for it"
                if weight.is_whole
                else "each rank holds only its rows, so the change would be lost"
            )
            raise CompileError(
                f"The forward changes the parameter {weight.name!r} in place (at {where(node)}), and {why}. Make it a "
                "buffer, freeze it on one device, or change it outside of the compiled forward, inside "
                "`with torch.no_grad(), fabric.strategy.summon_full(model, writeback=True):`."
            )


def refuse_gradients_in_buffers(
    graph: fx.GraphModule, buffers: Mapping[fx.Node, GraphInput]
) -> None:
    """Refuse graphs that write a value with a gradient to a buffer: eager's buffer would lead back to this call.

    Args:
        graph: The captured graph.
        buffers: Those that required no gradient at the call, by placeholder.

    Raises:
        CompileError: The graph does so; the message names the user's line.
    """
    for placeholder, buffer in buffers.items():
        if value_needs_grad(placeholder.meta["example_value"]):  # Dynamo ran the changes on it
            changes = [n for n in graph.graph.nodes if _changes(n, placeholder)]
            places = " or ".join(dict.fromkeys(map(where, changes))) or "an unknown line"
            raise CompileError(
                f"The forward writes a value that requires a gradient to the buffer {buffer.name!r} (at {places}). In "
                "eager PyTorch the buffer then requires a gradient too, and leads what reads it later back to this "
                "call; compiled code would lose that. Write the value's `.detach()`, or return the value as well."
            )


def _changes(node: fx.Node, placeholder: fx.Node) -> bool:
    operand = changed_operand(node)
    return operand is not None and storage(operand) == storage(placeholder)
