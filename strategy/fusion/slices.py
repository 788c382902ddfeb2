"""Computes in slices what reads a concatenation: for a CPU, inductor writes concatenations that are read to memory.

    joined = cat([-x[..., 32:], x[..., :32]], -1)
    y = x * cos + joined * sin
->
    first = x[..., :32] * cos[..., :32] + -x[..., 32:] * sin[..., :32]
    second = x[..., 32:] * cos[..., 32:] + x[..., :32] * sin[..., 32:]
    y = cat([first, second], -1)

Each number is computed as before, so the bits are the same. A rotary embedding takes half as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.fusion import inductor

_aten = torch.ops.aten
_JOINS = frozenset({_aten.cat.default, _aten.slice_backward.default})
"""The latter writes a tensor among zeros."""
_MOVES = _JOINS | {_aten.slice.Tensor}
_TURNS = frozenset({_aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default})
_ALSO_POINTWISE = frozenset(
    {_aten.clone.default, _aten._to_copy.default, torch.ops.prims.convert_element_type.default}
)
_MOST_SLICES = 4
_MOST_NODES = 120
"""The most nodes of a graph: functions that call themselves follow them, and Python limits how deep."""


class _UnsuitedError(ThunderMemsaveError, ValueError):
    """What is asked for cannot be computed in slices, or gains nothing."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Where the numbers of a node come from that are between two places of a dim."""

    operand: fx.Node
    dim: int
    """Of the operand."""
    start: int
    """The place in the operand of the first of them."""
    low: int
    high: int


def in_slices(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> list[fx.GraphModule]:
    """Return the graph that computes a graph's results in slices of those that read concatenations.

    Args:
        graph: Pure, of ATen operators whose nodes have a FakeTensor as `meta["val"]`; returns a list of tensors.
        inputs: FakeTensors with the layouts that it gets.

    Returns:
        One graph; none: nothing reads a concatenation, or not in slices alone.
    """
    nodes = list(graph.graph.nodes)
    if len(nodes) > _MOST_NODES or not any(n.target in _JOINS and _is_read(n) for n in nodes):
        return []
    placeholders = [node for node in nodes if node.op == "placeholder"]
    outputs: Any = graph.graph.output_node().args[0]

    def run(*args: Tensor) -> list[Tensor]:
        values = _Values(dict(zip(placeholders, args, strict=True)))
        return [_Result(node).made_of(values) for node in outputs]

    mode: Any = inputs[0]
    try:
        with inductor.options(), mode.fake_mode, torch._C.DisableTorchFunctionSubclass():
            return [make_fx(run)(*inputs)]
    except _UnsuitedError:
        return []


def _is_read(node: fx.Node) -> bool:
    return any(user.op != "output" for user in node.users)


class _Result:
    """How a result of a graph is computed in slices."""

    def __init__(self, node: fx.Node) -> None:
        self._views: list[fx.Node] = []
        """What makes the result of what is computed, the last one first."""
        while node.target is _aten.view.default:
            self._views.append(node)
            node = node.args[0]  # type: ignore[assignment]
        self._node = node
        self._dim, self._ends = next(
            ((dim, ends) for dim in range(_val(node).dim()) if (ends := _cuts(node, dim))), (0, ())
        )
        if len(self._ends) >= _MOST_SLICES:
            raise _UnsuitedError

    @cached_property
    def _order(self) -> list[int]:
        """The dims of the node, that of the largest stride first: a concatenation is laid out in the order of its."""
        strides = _val(self._node).stride()
        return sorted(range(len(strides)), key=lambda dim: -strides[dim])

    def made_of(self, values: _Values) -> Tensor:
        """Compute it."""
        made = self._joined(values) if self._ends else values.whole(self._node)
        for view in reversed(self._views):
            made = _called(view, lambda _, made=made: made)  # type: ignore[misc]
        return made

    def _joined(self, values: _Values) -> Tensor:
        size = _val(self._node).shape[self._dim]
        slices = [
            values.slice(self._node, self._dim, low, high)
            for low, high in pairwise((0, *self._ends, size))
        ]
        dim = self._order.index(self._dim)
        joined = _aten.cat.default([_aten.permute.default(s, self._order) for s in slices], dim)
        back = [self._order.index(each) for each in range(len(self._order))]
        made: Tensor = _aten.permute.default(joined, back)
        return made


class _Values:
    """The values of nodes and of their slices, each computed once."""

    def __init__(self, inputs: dict[fx.Node, Tensor]) -> None:
        self._wholes = inputs
        self._slices: dict[tuple[fx.Node, int, int, int], Tensor | None] = {}

    def whole(self, node: fx.Node) -> Tensor:
        """Return the value of a node.

        Raises:
            _UnsuitedError: It is a concatenation.
        """
        if node not in self._wholes:
            if node.target in _JOINS or node.op != "call_function":
                raise _UnsuitedError
            self._wholes[node] = _called(node, self.whole)
        return self._wholes[node]

    def slice(self, node: fx.Node, dim: int, low: int, high: int) -> Tensor:
        """Return what is between two places of a dim of a node.

        Raises:
            _UnsuitedError: It is zeros, which no operator made, or an operand is a concatenation that is read whole.
        """
        found = self._found(node, dim, low, high)
        if found is None:
            raise _UnsuitedError
        return found

    def _found(self, node: fx.Node, dim: int, low: int, high: int) -> Tensor | None:
        """Return a slice; None: zeros."""
        key = node, dim, low, high
        if key not in self._slices:
            self._slices[key] = self._made(*key)
        return self._slices[key]

    def _made(self, node: fx.Node, dim: int, low: int, high: int) -> Tensor | None:
        parts = _parts(node, dim)
        if parts is None:
            taken: Tensor = _aten.slice.Tensor(self.whole(node), dim, low, high)
            return taken
        if node.target in _MOVES:
            read = [p for p in parts if p.low < high and low < p.high]
            assert all(p.low <= low and high <= p.high for p in read), "slices end where parts do"
            return self._of(read[0], low, high) if read else None
        found = {part.operand: self._of(part, low, high) for part in parts}
        operands = {of: value for of, value in found.items() if value is not None}
        if len(operands) == len(found):
            return _called(node, lambda n: operands[n] if n in operands else self.whole(n))
        if node.target in _TURNS:
            return None
        if node.target is not _aten.add.Tensor or node.kwargs or set(node.args) != found.keys():
            raise _UnsuitedError
        return _with_zeros(node, [*operands.values()], dim, high - low)

    def _of(self, part: _Part, low: int, high: int) -> Tensor | None:
        shift = part.start - part.low
        return self._found(part.operand, part.dim, low + shift, high + shift)


def _with_zeros(node: fx.Node, operands: Sequence[Tensor], dim: int, size: int) -> Tensor | None:
    """Return the slice of a sum of zeros and those operands, as a sum: of zero and -0.0 it is 0.0. None: zeros.

    Args:
        node: The sum.
        operands: None or one.
        dim: Of the slice.
        size: Of that dim.
    """
    if not operands:
        return None
    (given,) = operands
    if not given.is_floating_point():
        raise _UnsuitedError
    # A sum with a number that is zero would be left out by inductor of PyTorch 2.15.
    added = inductor.multiply_add(given, torch.ones_like(given), torch.zeros_like(given))
    shape = list(_val(node).shape)
    shape[dim] = size
    if list(added.shape) != shape or added.dtype != _val(node).dtype:
        raise _UnsuitedError
    return added


def _cuts(node: fx.Node, dim: int) -> tuple[int, ...]:
    """Return where the slices of a dim of a node end that are computed differently, in order, the last end left out."""
    return _cuts_of(node, dim, {})


def _cuts_of(
    node: fx.Node, dim: int, known: dict[tuple[fx.Node, int], tuple[int, ...]]
) -> tuple[int, ...]:
    if (node, dim) not in known:
        found = set[int]()
        for part in _parts(node, dim) or ():
            shift = part.low - part.start
            inner = (cut + shift for cut in _cuts_of(part.operand, part.dim, known))
            found |= {part.low, part.high, *(c for c in inner if part.low < c < part.high)}
        known[node, dim] = tuple(sorted(found - {0, _val(node).shape[dim]}))
    return known[node, dim]


def _parts(node: fx.Node, dim: int) -> Sequence[_Part] | None:
    """Return where the numbers of a node come from, along a dim; None: a slice of it is taken of the whole."""
    if node.op != "call_function":
        return None
    if node.target in _MOVES:
        return _moved(node, dim)
    size = _val(node).shape[dim]
    if node.target in _TURNS:
        operand: Any = node.args[0]
        before = _dim_before(node, dim)
        return None if before is None else [_Part(operand, before, 0, 0, size)]
    return list(_operands(node, dim, size)) if _is_pointwise(node) else None


def _moved(node: fx.Node, dim: int) -> Sequence[_Part] | None:
    if node.target is _aten.cat.default:
        operands, of = _arguments(node, 0)
        is_cast = any(_val(operand).dtype != _val(node).dtype for operand in operands)
        return None if is_cast or _at(node, of) != dim else _joined(operands, dim)
    is_slice = node.target is _aten.slice.Tensor
    if is_slice:
        operand, of, start, end, step = _arguments(node, 0, None, None, 1)
    else:
        operand, _, of, start, end, step = _arguments(node)
    if step != 1 or _at(node, of) != dim:
        return None
    start, end, _ = slice(start, end).indices(_val(operand if is_slice else node).shape[dim])
    if is_slice:
        return [_Part(operand, dim, start, 0, _val(node).shape[dim])]
    return [_Part(operand, dim, 0, start, end)]


def _arguments(node: fx.Node, *defaults: Any) -> tuple[Any, ...]:
    """Return the arguments of a call, the last of which may be left out."""
    given = node.args
    return (*given, *defaults[len(given) - 1 :])


def _joined(operands: Sequence[fx.Node], dim: int) -> Sequence[_Part] | None:
    parts, low = [], 0
    for operand in operands:
        if _val(operand).shape == (0,):
            continue  # PyTorch leaves it out, whatever the others' shape
        high = low + _val(operand).shape[dim]
        if high > low:
            parts.append(_Part(operand, dim, 0, low, high))
        low = high
    return parts


def _operands(node: fx.Node, dim: int, size: int) -> Iterator[_Part]:
    """Yield the operands that have numbers of their own along a dim: others are broadcast."""
    num_dims = _val(node).dim()
    for operand in node.all_input_nodes:
        of = dim - num_dims + _val(operand).dim()
        if of >= 0 and _val(operand).shape[of] == size:
            yield _Part(operand, of, 0, 0, size)


def _dim_before(node: fx.Node, dim: int) -> int | None:
    """Return which dim of its operand a dim of a view is; None: it is a new one."""
    args: Any = node.args
    if node.target is _aten.permute.default:
        return _at(node, args[1][dim])
    if node.target is _aten.unsqueeze.default:
        new = _at(node, args[1])
        return None if dim == new else dim - (dim > new)
    first, second = (_at(node, each) for each in args[1:])
    return {first: second, second: first}.get(dim, dim)


def _at(node: fx.Node, dim: int) -> int:
    """Return a dim that may be counted from the end, from the start."""
    return dim % _val(node).dim()


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target in _ALSO_POINTWISE


def _called(node: fx.Node, value_of: Callable[[fx.Node], Tensor]) -> Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
    return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]


def _val(node: fx.Node) -> Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]
