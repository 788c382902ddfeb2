"""Losses of linear layers in fp8 whose logits are sliced: of all hidden states, because all of them have one scale.

    loss = cross_entropy(linear(hidden)[:, :-1].flatten(0, 1), targets)       # (2, 1024, width), (2046,)

becomes a loss of 2,048 tokens, of which the two that the slice leaves out are ignored:

    places = arange(2048).reshape(2, 1024, 1)[:, :-1].reshape(-1)
    targets = full((2048,), -100).scatter(0, places, targets)
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import fx

from thunder_memsave.frontend.rewrites.late_logits import InFp8
from thunder_memsave.frontend.rewrites.nodes import reshaped, shape_of, torch_call
from thunder_memsave.ops.location import module_name

_log = logging.getLogger(__name__)


class LayersInFp8(Protocol):
    """The linear layers of a graph that compute in fp8."""

    @property
    def has_tiled_losses(self) -> bool:
        """Whether the loss of one of them can be computed in tiles of tokens."""

    def computes(self, node: fx.Node) -> bool:
        """Return whether the node is one of them."""

    def late(self, node: fx.Node) -> InFp8:
        """Return how it runs after the call, if its results are read."""

    def join(self, linear: fx.Node, loss: fx.Node) -> None:
        """Let `loss`, a call of `linear_cross_entropy`, compute in place of the layer too."""


def say_that_it_stays(linear: fx.Node, *, has_adapter: bool) -> None:
    """Log that a linear that computes in fp8 keeps its logits.

    Args:
        linear: It, or the part of a linear with LoRA that does.
        has_adapter: Whether it is such a part; otherwise its recipe is `nvfp4`, in which gradients of logits have one
            amax, before and after their transform.
    """
    name = module_name(linear.meta.get("nn_module_stack"))
    _log.warning(
        "The loss of %r is not computed in tiles of tokens, because that linear layer computes in %s: its logits, %s, "
        "exist whole, and so do their gradients. Add %r to fp8.skip_modules to have the loss in tiles.",
        name,
        "fp8 and is a part of a head with LoRA" if has_adapter else "nvfp4",
        " x ".join(f"{size:,}" for size in shape_of(linear)),
        name,
    )


def rows_of(graph: fx.Graph, operand: fx.Node, width: int, shapes: Sequence[fx.Node]) -> fx.Node:
    """Return (tokens, width) of what a linear layer reads, after what its results went through.

    Args:
        graph: The graph, which gets the nodes.
        operand: (..., width).
        width: Its last dim.
        shapes: Nodes that change the shape of the layer's results.
    """
    for node in shapes:
        call = torch_call(node)
        if call is not None and call.name == "getitem":
            operand = graph.call_function(operator.getitem, (operand, call.args[1]))
        else:
            operand = reshaped(graph, operand, (*shape_of(node)[:-1], width))
    return reshaped(graph, operand, (-1, width))


def places_in_whole(graph: fx.Graph, hidden: fx.Node, shapes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the places of the tokens with a loss among all rows of hidden states; None: they are all."""
    calls = [torch_call(node) for node in shapes]
    if not any(call is not None and call.name == "getitem" for call in calls):
        return None
    before, device = shape_of(hidden)[:-1], hidden.meta["example_value"].device
    all_places = graph.call_function(torch.arange, (math.prod(before),), {"device": device})
    places = rows_of(graph, reshaped(graph, all_places, (*before, 1)), 1, shapes)
    return reshaped(graph, places, (-1,))


def of_whole(
    graph: fx.Graph, hidden: fx.Node, targets: fx.Node, places: fx.Node, ignore_index: int
) -> fx.Node:
    """Return targets for all rows of hidden states, of which those at no place are ignored."""
    settings = {"dtype": torch.int64, "device": hidden.meta["example_value"].device}
    shape = (math.prod(shape_of(hidden)[:-1]),)
    ignored = graph.call_function(torch.full, (shape, ignore_index), settings)
    return graph.call_function(torch.scatter, (ignored, 0, places, targets))
