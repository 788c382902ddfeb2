"""Functions that look at numbers, where no gradient is needed: they are called whole, and known by their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_memsave.aten.whole_calls import call_whole
from thunder_memsave.frontend.aliasing import changed_operand
from thunder_memsave.frontend.fx_nodes import node_callable, node_needs_grad
from thunder_memsave.frontend.opaque import OpaqueExecutor, is_random


@dataclass(frozen=True, slots=True)
class UnseenCalls:
    """Those of a graph that is run without numbers, first to see its results and then to trace it."""

    opaque: OpaqueExecutor
    """Gets the operations."""
    device: torch.device | None
    """Where every tensor is taken to be, for a plan; None: where it is."""
    _nodes: set[fx.Node] = field(default_factory=set)

    def value(
        self,
        node: fx.Node,
        compute: Callable[[fx.Node], Any],
        operands: Callable[[fx.Node], tuple[Sequence[Any], dict[str, Any]]],
    ) -> Any:
        """Return `compute(node)`, or the result of a whole call with `operands(node)`."""
        if node not in self._nodes:
            try:
                return compute(node)
            except (DataDependentOutputException, DynamicOutputShapeException):
                if not _is_of_known_shape_without_gradient(node):
                    raise
        self._nodes.add(node)
        return self._call(node, *operands(node))

    def _call(self, node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        leaves, structure = tree_flatten((list(args), kwargs))
        tensors = [v.detach() for v in leaves if isinstance(v, Tensor)]

        def record(operands: Sequence[Any]) -> Any:
            remaining = iter(operands)
            filled = [next(remaining) if isinstance(v, Tensor) else v for v in leaves]
            own_args, own_kwargs = tree_unflatten(filled, structure)
            function, expected = node_callable(node), node.meta["example_value"]
            return self.opaque.call(function, expected, own_args, own_kwargs, device=self.device)

        return call_whole(_Unseen(node, record), *tensors)


def _is_of_known_shape_without_gradient(node: fx.Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    makes_tensor = isinstance(node.meta.get("example_value"), Tensor)
    return is_call and makes_tensor and not node_needs_grad(node) and changed_operand(node) is None


@dataclass(frozen=True, slots=True)
class _Unseen:
    node: fx.Node
    call: Callable[[Sequence[Any]], TensorProxy]

    def result(self, tensors: Sequence[Tensor]) -> Tensor:
        like: Tensor = self.node.meta["example_value"]
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def gradients(self, grad: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [None for _ in tensors]

    def record(self, operands: Sequence[Any], others: Sequence[Any]) -> tuple[TensorProxy, None]:
        result = self.call(operands)
        if is_random(self.node):
            get_tracectx().peek_scope()[-1].tags.add(OpTags.RANDOM_OP)
        return result, None

    def record_backward(self, grad: Any, saved: None) -> Sequence[Any]:
        raise AssertionError("it has no derivative")

    def is_as(self, other: Any) -> bool:
        return self is other
