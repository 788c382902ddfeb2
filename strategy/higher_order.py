"""Lowers the higher-order operators of a captured graph: checkpointed regions and custom autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import fx

from thunder_memsave import compat

compat.apply()

from thunder.core import prims  # noqa: E402
from thunder.core.proxies import TensorProxy  # noqa: E402
from thunder.core.symbol import Symbol  # noqa: E402

from thunder_memsave.opaque import OpaqueExecutor  # noqa: E402

_ids = count()


class Evaluator(Protocol):
    """What a rule needs of the lowering that calls it."""

    opaque: OpaqueExecutor

    def evaluate(self, graph: fx.GraphModule, arguments: Sequence[Any]) -> Any:
        """Run a subgraph on values."""


def _checkpoint(
    lowering: Evaluator, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Inline the region: its values are then kept or recomputed like all others, and dropout is drawn once.

    Thunder's own rule recomputes the region and draws its dropout again, which gives wrong gradients.
    """
    body, *inputs = args
    return lowering.evaluate(body, inputs)


def _autograd_function(
    lowering: Evaluator, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """One symbol whose gradient is the user's `backward`, lowered the same way as the forward."""
    forward, backward, *inputs = args

    def run_forward(*inputs: Any) -> Any:
        return lowering.evaluate(forward, inputs)

    def meta(*inputs: Any) -> Any:
        # Values of the body are constants of the differentiation, the copies are not.
        return tuple(map(prims.shallow_copy, run_forward(*inputs)[0]))

    def grad(*inputs: Any) -> Any:
        outputs, saved = run_forward(*inputs)
        outputs = tuple(map(prims.shallow_copy, outputs))
        grad_outputs = [prims.get_grad(o) for o in outputs]
        grad_inputs = lowering.evaluate(backward, (*grad_outputs, *saved))
        tensors = [i for i in inputs if isinstance(i, TensorProxy)]
        for tensor, gradient in zip(tensors, _sequence(grad_inputs), strict=True):
            if gradient is not None:
                prims.put_grad(tensor, gradient)
        return outputs

    name = f"autograd_function_{next(_ids)}"
    symbol = Symbol(name=name, meta=meta, id=f"thunder_memsave.{name}", is_prim=False)
    lowering.opaque.register_implementation(
        symbol, execution_transform=meta, grad_transform=grad, checker=lambda *_: True
    )
    return symbol(*inputs)


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


HIGHER_ORDER: Mapping[Any, Callable[[Any, fx.Node, Sequence[Any], Mapping[str, Any]], Any]] = {
    torch.ops.higher_order.tag_activation_checkpoint: _checkpoint,
    torch.ops.higher_order.autograd_function_apply: _autograd_function,
}
