"""Reads the nodes of a captured graph: the function, and the fake value that PyTorch gave its result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from thunder.core.symbol import BoundSymbol
from torch import Tensor, fx
from torch.utils._pytree import tree_iter

from thunder_memsave.aten.origin import REGION
from thunder_memsave.errors import CompileError, user_frame_of_text
from thunder_memsave.ops.location import Location, locate
from thunder_memsave.ops.location import module_name as named_module
from thunder_memsave.passes.checkpoint_regions import Region, mark

_UNKNOWN = (torch.SymInt, torch.SymFloat, torch.SymBool)


def where(node: fx.Node) -> str:
    """Return the user's line that a node is from, for messages."""
    return user_frame_of_text(node.meta.get("stack_trace"))


def tag_origin(symbols: Sequence[BoundSymbol], node: fx.Node) -> None:
    """Tag symbols that have no location with the source line, the module and the checkpointed region of a node."""
    source = where(node).partition(" in ")[0]
    stack = node.meta.get("nn_module_stack")
    locate(symbols, Location(source=source, module=named_module(stack)))
    if (number := node.meta.get(REGION)) is not None:
        mark(symbols, Region(number))


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


def refuse_numbers(node: fx.Node) -> None:
    """Refuse what reads a number from a tensor, or makes a shape of its numbers: both differ from call to call.

    Raises:
        CompileError: The node does so; the message names the user's line.
    """
    values = list(tree_iter(node.meta.get("example_value")))
    sizes = [size for v in values if isinstance(v, Tensor) for size in v.shape]
    if any(isinstance(v, _UNKNOWN) for v in values):
        why = "it reads a number from a tensor, which differs from call to call"
        advice = "Compute with the tensor itself"
    elif any(isinstance(size, _UNKNOWN) for size in sizes):
        why = "the shape of its result depends on numbers"
        advice = "Use torch.where or a mask, which keep the shape"
    else:
        return
    raise CompileError(
        f"{function_name(node_callable(node))} (at {where(node)}) cannot be compiled: {why}. {advice}, or keep it out "
        "of the compiled model."
    )


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
