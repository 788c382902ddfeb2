"""Moves a power of two from the result of a linear layer to its input, where that is smaller, with the same bits.

LoRA scales each adapter by `alpha / r`, in full size, in forward and in backward:

    y = y + linear(a, weight) * 2.0

becomes `y + linear(a * 2.0, weight)`, with a of r numbers per token. To multiply by a power of two is exact for all
results and gradients within the range of normal numbers. In float16 that range is narrow, so there nothing is moved.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from thunder_memsave.frontend.aliasing import storage
from thunder_memsave.frontend.rewrites.nodes import shape_of, torch_call

_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def scale_smaller_operands(
    graph: fx.GraphModule, *, changed: Set[Any], stays: Callable[[fx.Node], bool]
) -> None:
    """Multiply the inputs of linear layers in place of their larger results.

    Args:
        graph: The graph, changed in place.
        changed: The storages that it changes in place, from `changed_storages`.
        stays: `(linear) -> whether it must get the input that it has`, such as one whose state depends on that.
    """
    for node in list(graph.graph.nodes):
        scaled = _scaled_linear(node)
        if scaled is not None and not stays(scaled[0]):
            linear, factor = scaled
            if changed.isdisjoint(map(storage, (node, linear, linear.args[0]))):
                _move(node, linear, factor)


def _scaled_linear(node: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the linear layer without bias whose result is only multiplied by this power of two."""
    call = torch_call(node)
    if call is None or call.name != "mul" or len(call.args) != 2 or call.kwargs:
        return None
    linears = [a for a in call.args if isinstance(a, fx.Node) and a.target is F.linear]
    factors = [a for a in call.args if isinstance(a, float | int) and _is_power_of_two(a)]
    if len(linears) != 1 or len(factors) != 1 or list(linears[0].users) != [node]:
        return None
    return (linears[0], factors[0]) if _can_scale_input(node, linears[0]) else None


def _is_power_of_two(number: float) -> bool:
    return math.isfinite(number) and abs(math.frexp(number)[0]) == 0.5


def _can_scale_input(node: fx.Node, linear: fx.Node) -> bool:
    if linear.kwargs or len(linear.args) not in (2, 3) or linear.args[2:] not in ((), (None,)):
        return False
    operand: Any = linear.args[0]
    values: list[Any] = [n.meta.get("example_value") for n in (node, linear, operand)]
    if not all(isinstance(v, Tensor) and v.dtype in _DTYPES for v in values):
        return False
    is_alike = values[0].requires_grad is values[1].requires_grad
    return is_alike and shape_of(operand)[-1] < shape_of(linear)[-1]


def _move(node: fx.Node, linear: fx.Node, factor: float) -> None:
    operand: Any = linear.args[0]
    example = operand.meta["example_value"]
    with node.graph.inserting_before(linear):
        scaled = node.graph.call_function(operator.mul, (operand, factor))
    scaled.meta = {**linear.meta, "example_value": _like(example)}
    linear.update_arg(0, scaled)
    node.replace_all_uses_with(linear)
    node.graph.erase_node(node)


def _like(example: Any) -> Tensor:
    """Return a fake tensor with the metadata of a product of `example`."""
    with example.fake_mode, torch.set_grad_enabled(example.requires_grad):
        return torch.mul(example, 1.0)
