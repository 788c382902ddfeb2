"""Assembles the outputs of a captured graph, and finds the inputs that each is differentiable in.

Outputs are computed values, inputs returned unchanged, views of inputs, logits that are made when they are read, and
plain Python values. A view is made of the
input outside of the trace: a caller who changes it in place changes the input, and autograd knows of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from torch import Tensor, fx

from thunder_memsave.frontend.aliasing import storage
from thunder_memsave.frontend.fx_nodes import node_callable, own_name
from thunder_memsave.frontend.rewrites.late_logits import LateNodes
from thunder_memsave.frontend.rewrites.late_tensor import Kind, LateOutput

_SHAPES = ("view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
_DIMS = ("t", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims")
_PARTS = ("getitem", "narrow", "select", "chunk", "split", "tensor_split", "unbind", "diagonal")
_OTHERS = ("expand", "expand_as", "as_strided", "unfold")
_TAKES_VIEWS = frozenset((*_SHAPES, *_DIMS, *_PARTS, *_OTHERS))
"""Names of functions whose derivative is that of the view. A user's own function may return a view with another one."""


@dataclass(frozen=True, slots=True)
class ViewOfInput:
    """An output that is a part of an input's memory."""

    position: int
    """The index of the input."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Number of elements from the input's first one."""

    def of(self, value: Tensor) -> Tensor:
        """Return the view of the input itself."""
        first = value.storage_offset() + self.offset
        return value.as_strided(self.shape, self.stride, first)


def views_of_inputs(
    graph: fx.GraphModule, *, of: Collection[fx.Node], changed: Collection[Any]
) -> dict[fx.Node, ViewOfInput]:
    """Return the outputs that are views of the placeholders `of`.

    Args:
        graph: The captured graph.
        of: The placeholders that stand for tensors as the caller has them.
        changed: Identifiers of the storages that the graph changes in place; their views are computed.
    """
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    bases = {
        storage(node): (position, node.meta["example_value"])
        for position, node in enumerate(placeholders)
        if node in of and storage(node) not in changed
    }
    outputs = graph.graph.output_node().args[0]
    found = {}
    for node in outputs:  # type: ignore[union-attr]
        if isinstance(node, fx.Node) and (base := bases.get(storage(node))) is not None:
            position, value = base
            view = node.meta["example_value"]
            if _is_taken(node, placeholders[position]) and _is_view(view, value):
                first = int(view.storage_offset()) - int(value.storage_offset())
                shape, stride = tuple(map(int, view.shape)), tuple(map(int, view.stride()))
                found[node] = ViewOfInput(position, shape, stride, first)
    return found


def _is_taken(node: fx.Node, of: fx.Node) -> bool:
    """Whether the node takes views of a placeholder, at least one."""
    while node.op in ("call_function", "call_method"):
        name = node.target if node.op == "call_method" else own_name(node_callable(node))
        if name not in _TAKES_VIEWS or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
        if node is of:
            return True
    return False


def _is_view(value: Tensor, of: Tensor) -> bool:
    """Whether autograd would see `value` as a view of `of`, which has no elements that share memory."""
    same = value.dtype is of.dtype and value.requires_grad is of.requires_grad
    return same and of.is_contiguous() and value.is_conj() is of.is_conj()


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
    def of(
        cls,
        graph: fx.GraphModule,
        outputs: Sequence[Any],
        computed: Sequence[fx.Node],
        views: Mapping[fx.Node, ViewOfInput],
        late: Mapping[int, LateNodes],
    ) -> Self:
        """Record the order of `outputs`; `computed` are the nodes that the trace returns, `late` outputs by index."""
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        position: dict[fx.Node, tuple[str, Any]] = {n: ("input", i) for i, n in enumerate(inputs)}
        position.update({n: ("view", v) for n, v in views.items()})
        position.update({n: ("computed", i) for i, n in enumerate(computed)})
        order = [position[o] if isinstance(o, fx.Node) else ("value", o) for o in outputs]
        for index, nodes in late.items():
            order[index] = "late", _late_output(nodes, position)
        return cls(tuple(order))

    def __call__(self, inputs: Sequence[Tensor], computed: Sequence[Any]) -> Sequence[Any]:
        """Return the graph's outputs from its inputs and the computed values."""
        of: dict[str, Callable[[Any], Any]] = {
            "input": inputs.__getitem__,
            "computed": computed.__getitem__,
            "view": lambda view: view.of(inputs[view.position]),
            "late": lambda late: late.of(inputs, computed),
            "value": lambda value: value,
        }
        return [of[kind](value) for kind, value in self.order]


def _late_output(nodes: LateNodes, position: Mapping[fx.Node, tuple[str, Any]]) -> LateOutput:
    operands = tuple(position[operand] for operand in nodes.operands)
    return LateOutput(
        make=nodes.make,
        operands=operands,
        kind=Kind.of(nodes.example),
        needs_grad=nodes.example.requires_grad,
        scale=nodes.scale,
    )


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
