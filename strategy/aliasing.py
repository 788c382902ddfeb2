"""Finds in-place operations in a captured graph, and refuses those whose effect Thunder would lose.

Thunder makes in-place operations functional, but drops the effect of a change made through one view on another view of
the same storage: the result would silently differ from eager's.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx

from thunder_memsave.errors import CompileError, user_frame_of_text

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


def changed_operand(node: fx.Node) -> fx.Node | None:
    """The tensor that `node` changes in place, if it does."""
    if node.op not in ("call_method", "call_function") or not node.args:
        return None
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    in_place = (
        node.target in _IN_PLACE_OPERATORS
        or (name.endswith("_") and not name.endswith("__"))
        or node.kwargs.get("inplace") is True
    )
    operand = node.args[0]
    return operand if in_place and isinstance(operand, fx.Node) and _storage(operand) else None


def refuse_lost_changes(graph: fx.GraphModule) -> None:
    """Raise where a tensor is changed in place and another view of its storage is used afterwards.

    Raises:
        CompileError: names the user's line of the change.
    """
    nodes = list(graph.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    for node in nodes:
        operand = changed_operand(node)
        if operand is None:
            continue
        for other in nodes[: position[node]]:
            if other is operand or _storage(other) != _storage(operand) or _is_same(other, operand):
                continue
            if any(position[user] > position[node] for user in other.users):
                raise CompileError(
                    f"A tensor is changed in place at {user_frame_of_text(node.meta.get('stack_trace'))} while another "
                    "view of it is used later; Thunder would lose the change. Write the operation out of place."
                )


def _storage(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _is_same(node: fx.Node, operand: fx.Node) -> bool:
    """Whether `node` is `operand` itself, as the result of an earlier in-place operation is."""
    changed = changed_operand(node)
    return changed is not None and (changed is operand or _is_same(changed, operand))
