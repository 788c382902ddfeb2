"""Reads the nodes of a captured graph: the function, and the fake value that PyTorch gave its result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

REGION = "checkpoint_region"
"""Key in a node's meta of the number of its outermost checkpointed region."""
UNREACHED = "unreached"
"""Key in a node's meta: those of its operands that its derivative gives no gradient to."""


def node_callable(node: fx.Node) -> Callable[..., Any]:
    """Return the function or method that the node calls."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target))  # type: ignore[no-any-return]
    assert callable(node.target), f"Dynamo inlines modules, got {node.op}"
    return node.target


def function_name(function: Callable[..., Any]) -> str:
    """Return its name with the module, for messages."""
    return f"{module_name(function)}.{own_name(function)}"


def own_name(function: Callable[..., Any]) -> str:
    """Return its name without the module; a callable object has its type's name."""
    return str(getattr(function, "__name__", type(function).__qualname__))


def module_name(function: Callable[..., Any]) -> str:
    """Return the name of its module; PyTorch's C++ functions do not state theirs."""
    return str(getattr(function, "__module__", None) or "torch")


def example_values(nodes: Iterable[Any]) -> list[Any]:
    """Return the fake values of those items that are nodes."""
    return [n.meta.get("example_value") for n in nodes if isinstance(n, fx.Node)]


def node_needs_grad(node: fx.Node) -> bool:
    """Return whether the node's result requires a gradient in eager."""
    expected = node.meta.get("example_value")
    if not node.all_input_nodes:
        # A new tensor: only a later in-place operation can make it require a gradient.
        return False
    if expected is None:  # an operation on its operand, such as `x[0] = y`
        return any(value_needs_grad(n.meta.get("example_value")) for n in node.all_input_nodes)
    return value_needs_grad(expected)


def value_needs_grad(expected: Any) -> bool:
    """Return whether a tensor, or any in a tuple or list, requires a gradient."""
    if isinstance(expected, (tuple, list)):
        return any(value_needs_grad(e) for e in expected)
    return isinstance(expected, Tensor) and expected.requires_grad


@dataclass(frozen=True, slots=True)
class GraphCode:
    """The code of a graph and of the graphs in it: equal for graphs that do the same with the same inputs."""

    source: str
    functions: Mapping[str, Any]
    """The values that the source's names stand for."""
    inner: Mapping[str, GraphCode]


def graph_code(graph: fx.GraphModule) -> GraphCode | None:
    """Return the graph's code; None if it holds tensors, whose values no code tells."""
    inner: dict[str, GraphCode] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        held = operator.attrgetter(node.target)(graph)
        code = graph_code(held) if isinstance(held, fx.GraphModule) else None
        if code is None:
            return None
        inner[node.target] = code
    if any(node.op == "call_module" for node in graph.graph.nodes):
        return None
    python = graph.graph.python_code("self")
    return GraphCode(python.src, python.globals, inner)
