"""What a captured graph knows about its nodes: the function, and the value that PyTorch's kernels gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx


def node_callable(node: fx.Node) -> Callable[..., Any]:
    """The function or method that the node calls."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target))  # type: ignore[no-any-return]
    assert callable(node.target), f"Dynamo inlines modules, got {node.op}"
    return node.target


def function_name(function: Callable[..., Any]) -> str:
    """Its name with the module, for messages."""
    return f"{module_name(function)}.{own_name(function)}"


def own_name(function: Callable[..., Any]) -> str:
    """Its name without the module; that of its type, where it is an object that can be called."""
    return str(getattr(function, "__name__", type(function).__qualname__))


def module_name(function: Callable[..., Any]) -> str:
    """The name of the module that it is from; PyTorch's functions in C++ do not say theirs."""
    return str(getattr(function, "__module__", None) or "torch")


def example_values(nodes: Iterable[Any]) -> list[Any]:
    """The fake values of those that are nodes."""
    return [n.meta.get("example_value") for n in nodes if isinstance(n, fx.Node)]


def node_needs_grad(node: fx.Node) -> bool:
    """Whether eager attaches a gradient to what the node gives."""
    expected = node.meta.get("example_value")
    if not node.all_input_nodes:
        # A new tensor: if it requires a gradient, that is by a later in-place operation.
        return False
    if expected is None:  # an operation on its operand, such as `x[0] = y`
        return any(value_needs_grad(n.meta.get("example_value")) for n in node.all_input_nodes)
    return value_needs_grad(expected)


def value_needs_grad(expected: Any) -> bool:
    """Whether a tensor, or any in a tuple or list, requires a gradient."""
    if isinstance(expected, (tuple, list)):
        return any(value_needs_grad(e) for e in expected)
    return isinstance(expected, Tensor) and expected.requires_grad
