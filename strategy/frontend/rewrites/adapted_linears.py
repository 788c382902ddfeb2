"""Finds a linear layer with a low-rank adapter around it, as peft writes LoRA.

    linear(hidden, weight, bias) + linear(low, up) * factor

`low` is what the adapter's first layer makes of the hidden states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, fx

from thunder_memsave.frontend.rewrites.nodes import shape_of, torch_call

_SUMS = ("add", "iadd")
_PRODUCTS = ("mul", "multiply")


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A sum of a linear layer and what an adapter adds to it."""

    linear: fx.Node
    up: fx.Node
    """The adapter's last layer, without a bias."""
    factor: float
    nodes: tuple[fx.Node, ...]
    """All nodes of the sum, in order; each is read by another of them alone, but for the last."""


def adapted_linear(total: fx.Node) -> AdaptedLinear | None:
    """Return the parts of a sum; None if it is another, or anything else reads a part."""
    call = torch_call(total)
    if call is None or call.name not in _SUMS or call.kwargs or len(call.args) != 2:
        return None
    linear, added = call.args
    if not _is_linear(linear, total) or not isinstance(added, fx.Node):
        return None
    product = _product(added, total)
    if product is None:
        return None
    up, factor, between = product
    if len(up.args) == 3 and up.args[2] is not None:
        return None
    values = [n.meta.get("example_value") for n in (linear, up, *between, total)]
    if not all(isinstance(v, Tensor) for v in values):
        return None
    if len({(v.dtype, v.shape) for v in values}) > 1:
        return None
    if shape_of(linear.args[0])[:-1] != shape_of(up.args[0])[:-1]:  # type: ignore[arg-type]
        return None
    return AdaptedLinear(linear, up, factor, (linear, up, *between, total))


def _product(added: fx.Node, total: fx.Node) -> tuple[fx.Node, float, tuple[fx.Node, ...]] | None:
    """Return the last layer, its factor, and the node of the product, if there is one."""
    if _is_linear(added, total):
        return added, 1.0, ()
    call = torch_call(added)
    if call is None or call.name not in _PRODUCTS or call.kwargs or set(added.users) != {total}:
        return None
    up = [a for a in call.args if isinstance(a, fx.Node)]
    numbers = [a for a in call.args if isinstance(a, float | int) and not isinstance(a, bool)]
    if len(up) != 1 or len(numbers) != 1 or not _is_linear(up[0], added):
        return None
    return (up[0], float(numbers[0]), (added,)) if math.isfinite(numbers[0]) else None


def _is_linear(node: object, reader: fx.Node) -> bool:
    """Return whether it is a linear layer whose weight is a tensor of the graph, and that nothing else reads."""
    return (
        isinstance(node, fx.Node)
        and node.target is F.linear
        and not node.kwargs
        and set(node.users) == {reader}
        and len(node.args) in (2, 3)
        and all(isinstance(a, fx.Node) for a in node.args[:2])
        and len(shape_of(node.args[1])) == 2  # type: ignore[arg-type]
    )
