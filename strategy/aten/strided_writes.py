"""Writes in place keep the strides of what they write to; their functional forms, which replace them, must too.

`Tensor.bernoulli_(p)`, which dropout on a CPU calls on a tensor with the strides of its input, draws for a transposed
tensor in the order of its memory. `aten.bernoulli.p`, to which functionalization turns it, draws for a contiguous one.
`aten.masked_fill` of a transposed tensor is contiguous, and so are `index_add`, `tril` and others: a later view that
eager PyTorch takes is then none, and functionalization ends in an error.

    v.masked_fill_(mask, 0.0)       # becomes: v.permute(order).masked_fill_(mask.permute(order), 0.0)
    v.index_add_(1, i, x)           # becomes: v.copy_(index_add(v, 1, i, x))

with the order of dims in which `v` is contiguous. So the numbers and the strides are those of eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_BERNOULLI = _aten.bernoulli_.float
_MASKED_FILLS = (_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor)


def write_in_memory_order(graph: fx.Graph) -> None:
    """Let the functional forms of a graph's writes keep the strides of what is written to."""
    for node in list(graph.nodes):
        target, operand = node.target, node.args[0] if node.args else None
        if isinstance(target, OpOverload) and isinstance(operand, list | tuple):
            _refuse_views(target, operand)
        if not (isinstance(target, OpOverload) and isinstance(operand, fx.Node)):
            continue
        value = operand.meta.get("val")
        if not (_writes_numbers(target) and isinstance(value, Tensor)):
            continue
        _refuse_repeated_memory(target, value)
        order = _order_in_memory(value)
        if order is not None and _rewritten(node, target, value, order):
            node.replace_all_uses_with(operand)


def _writes_numbers(target: OpOverload) -> bool:
    """Tell whether an operator writes to its first argument; some change but its shape, such as `unsqueeze_`."""
    first = target._schema.arguments[0] if target._schema.arguments else None
    info = None if first is None else first.alias_info
    return bool(info and info.is_write) and torch.Tag.inplace_view not in target.tags


def _refuse_views(target: OpOverload, operands: Sequence[Any]) -> None:
    """Refuse to write to views by a `_foreach_` operator: traced, PyTorch's gradient is that without the write."""
    targets = (o.target for o in operands if isinstance(o, fx.Node))
    if _writes_numbers(target) and any(isinstance(t, OpOverload) and t.is_view for t in targets):
        name = target._schema.name.removeprefix("aten::")
        raise RuntimeError(
            f"{name} writes to a view, and its gradient would be lost; write to each tensor by itself"
        )


def _refuse_repeated_memory(target: OpOverload, value: Tensor) -> None:
    """Refuse a write to memory that a tensor has several times: functionalization adds up what is written there."""
    pairs = zip(value.shape, value.stride(), strict=True)
    if value.numel() and any(size > 1 and stride == 0 for size, stride in pairs):
        name = target._schema.name.removeprefix("aten::")
        raise RuntimeError(
            f"{name} writes to a view by expand, whose elements share memory; write to what it is of"
        )


def _rewritten(node: fx.Node, target: OpOverload, value: Tensor, order: list[int]) -> bool:
    """Rewrite a write to a tensor that is contiguous in another order; tell whether that was necessary."""
    operand, *others = node.args
    functional = _functional(target)
    if target is _BERNOULLI:
        node.args = (_permuted(node, operand, order), *others)
    elif target in _MASKED_FILLS:
        mask = _like(node, others[0], _aten.expand.default, value.shape)
        filled = (_permuted(node, each, order) for each in (operand, mask))
        node.args = (*filled, *others[1:])
    elif functional is None or _keeps_strides(functional, node, value):
        return False
    else:
        with node.graph.inserting_before(node):
            made = node.graph.call_function(functional, node.args, node.kwargs)
        made.meta = {**node.meta}
        node.target, node.args, node.kwargs = _aten.copy_.default, (operand, made), {}
    return True


def _order_in_memory(value: Tensor) -> list[int] | None:
    """Return the order of dims in which the tensor is contiguous; None: it is as it is, or never."""
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    is_changed = not value.is_contiguous() and value.permute(order).is_contiguous()
    return order if is_changed else None


def _permuted(node: fx.Node, operand: Any, order: list[int]) -> fx.Node:
    return _like(node, operand, _aten.permute.default, order)


def _like(node: fx.Node, operand: Any, view: OpOverload, sizes: Sequence[int]) -> fx.Node:
    """Return a view of a node's operand, before the node."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(view, (operand, list(sizes)))
    made.meta = {**node.meta, "val": view(operand.meta["val"], list(sizes))}
    return made


def _functional(target: OpOverload) -> OpOverload | None:
    """Return the operator that gives as a new tensor what another one writes; None: there is none of its name."""
    packet = getattr(_aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None)
    if not isinstance(found, OpOverload) or found._schema.is_mutable:
        return None
    return found if _types(found) == _types(target) else None


def _types(target: OpOverload) -> list[str]:
    """Return the types of an operator's arguments: `pow.Scalar` has a number where `pow_.Scalar` has a tensor."""
    return [str(argument.type) for argument in target._schema.arguments]


def _keeps_strides(functional: OpOverload, node: fx.Node, value: Tensor) -> bool:
    """Tell whether the functional form of a write has a result with the strides of what is written to."""
    args, kwargs = tree_map_only(fx.Node, _value_of, (node.args, node.kwargs))
    made = functional(*args, **kwargs)
    return not isinstance(made, Tensor) or made.stride() == value.stride()


def _value_of(node: fx.Node) -> Any:
    """Return the tensor without numbers that a node makes, or the constant that it is."""
    if "val" in node.meta:
        return node.meta["val"]
    return getattr(node.graph.owning_module, str(node.target))
