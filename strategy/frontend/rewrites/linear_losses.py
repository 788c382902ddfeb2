"""Joins a linear layer and the cross-entropy of its results into one call, which never makes the logits whole.

A language model with a vocabulary of 128,256 has 1 GB of logits in float32 for 2,048 tokens, and its loss three times
that:

    logits = linear(hidden, weight)                                           # (2, 1024, 128256)
    loss = cross_entropy(logits[:, :-1].float().flatten(0, 1), targets)

becomes `linear_cross_entropy(hidden[:, :-1].flatten(0, 1), weight, None, targets)`. Between the two there may be casts
to a wider dtype, factors, a cap by `tanh`, slices and new shapes of the tokens; the layer may have LoRA around it. The
caller may get the logits too, as of a model that is given `labels=`: they are made when they are read
(`late_tensor.py`). Left alone are logits that anything else reads; those of few elements, whose loss keeps eager's
bits; and float16, in which gradients for a cotangent of one underflow, or overflow, before they are multiplied by a
scaled one. A layer that computes in fp8 is joined as well (`fp8_losses.py`), unless it has LoRA, which the log says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from thunder_memsave.frontend.aliasing import storage
from thunder_memsave.frontend.rewrites.adapted_linears import AdaptedLinear, adapted_linear
from thunder_memsave.frontend.rewrites.fp8_losses import (
    LayersInFp8,
    of_whole,
    places_in_whole,
    rows_of,
    say_that_it_stays,
)
from thunder_memsave.frontend.rewrites.late_logits import LateNodes, leave_out, may_be_late
from thunder_memsave.frontend.rewrites.nodes import erase_unused, reshaped, shape_of, torch_call
from thunder_memsave.ops.families.counted_targets import COUNTED_TARGETS
from thunder_memsave.ops.families.linear_cross_entropy import linear_cross_entropy

FEWEST_LOGITS = 2**20
"""Below that, memory is saved that no one misses."""
_PARAMETERS = (
    *("input", "target", "weight", "size_average", "ignore_index"),
    *("reduce", "reduction", "label_smoothing"),
)
_CASTS = ("float", "double", "to", "type")
_SHAPES = ("view", "reshape", "flatten", "contiguous", "clone", "squeeze", "unsqueeze")
_FACTORS: Mapping[str, Callable[[float], float]] = {
    "mul": lambda number: number,
    "multiply": lambda number: number,
    "div": lambda number: 1.0 / number,
    "truediv": lambda number: 1.0 / number,
}


@dataclass(slots=True)
class _Logits:
    """The way from a linear layer to a loss."""

    linear: fx.Node
    nodes: list[fx.Node]
    """Nodes from the linear layer to the one before the loss, in order."""
    factor: float = 1.0
    """Factor of the logits, or of the operand of `tanh`."""
    cap: float | None = None
    """Factor of the results of `tanh`."""
    shapes: list[fx.Node] = field(default_factory=list)
    """Nodes that change the shape of the tokens."""

    is_swapped: bool = False
    """Whether the classes are the second dim of three."""

    returned: fx.Node | None = None
    """The node between that the graph also returns."""

    adapter: AdaptedLinear | None = None
    """The linear layer with an adapter, if it has one."""

    @property
    def linears(self) -> list[fx.Node]:
        """The linear layer, and the adapter's last one."""
        return [self.linear] if self.adapter is None else [self.linear, self.adapter.up]

    @property
    def scale(self) -> float:
        """Factor of the logits before they are capped."""
        scale = self.factor * (1.0 if self.cap is None else self.cap)
        return 1.0 if math.isclose(scale, 1.0, rel_tol=1e-12) else scale


def join_linear_losses(
    graph: fx.GraphModule,
    *,
    changed: Set[Any],
    grad_enabled: bool,
    fp8: LayersInFp8 | None,
    returns: bool,
) -> dict[int, LateNodes]:
    """Replace losses of linear layers, and erase the logits.

    Args:
        graph: The graph, changed in place.
        changed: The storages that it changes in place, from `changed_storages`.
        grad_enabled: Whether the call has gradients.
        fp8: The linear layers that compute in fp8, which are told what they are joined to.
        returns: Whether logits that the graph returns are computed; otherwise they are made when they are read.

    Returns:
        The outputs that are made when they are read, by their index.
    """
    late: dict[int, LateNodes] = {}
    for loss in graph.graph.find_nodes(op="call_function", target=F.cross_entropy):
        given = _arguments(loss)
        if given is None or (logits := _logits(given["input"], loss)) is None:
            continue
        if not _is_like_eager(logits, loss, given, changed, grad_enabled):
            continue
        is_late = logits.returned is not None
        if is_late and (returns or logits.adapter is not None or not may_be_late(logits.linear)):
            continue
        in_fp8 = None if fp8 is None else next(filter(fp8.computes, logits.linears), None)
        has_adapter = logits.adapter is not None
        if fp8 is not None and in_fp8 and (has_adapter or not fp8.has_tiled_losses):
            say_that_it_stays(in_fp8, has_adapter=has_adapter)
            continue
        if logits.returned is not None:
            in_fp8_too = None if fp8 is None or in_fp8 is None else fp8.late(in_fp8)
            late.update(leave_out(graph, logits.nodes, logits.returned, in_fp8_too))
        joined = _join(logits, loss, given, is_in_fp8=in_fp8 is not None)
        if fp8 is not None and in_fp8 is not None:
            fp8.join(in_fp8, joined)
    return late


def _arguments(loss: fx.Node) -> dict[str, Any] | None:
    """Return the arguments by name; None if they are what the one call does not know."""
    given = {**dict(zip(_PARAMETERS, loss.args, strict=False)), **loss.kwargs}
    if any(given.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return None
    values, targets = given.get("input"), given.get("target")
    if not isinstance(values, fx.Node) or not isinstance(targets, fx.Node):
        return None
    of_targets = targets.meta.get("example_value")
    is_of_classes = isinstance(of_targets, Tensor) and of_targets.dtype is torch.int64
    return given if is_of_classes else None


def _logits(values: fx.Node, loss: fx.Node) -> _Logits | None:
    """Return the way from a linear layer to the argument of a loss; None if there is none, or others read it."""
    nodes: list[fx.Node] = []
    returned: fx.Node | None = None
    node, reader = values, loss
    while isinstance(node.meta.get("example_value"), Tensor):
        others = set(node.users) - {reader}
        if others and (returned is not None or others != {node.graph.output_node()}):
            return None
        returned = node if others else returned
        nodes.insert(0, node)
        if node.target is F.linear:
            return _understood(_Logits(node, nodes, returned=returned))
        if (adapted := adapted_linear(node)) is not None:
            nodes[:1] = adapted.nodes
            return _understood(_Logits(adapted.linear, nodes, returned=returned, adapter=adapted))
        call = torch_call(node)
        operands = [] if call is None else [a for a in call.args if isinstance(a, fx.Node)]
        if len(operands) != 1 or len(node.all_input_nodes) != 1:
            return None
        node, reader = operands[0], node
    return None


def _understood(logits: _Logits) -> _Logits | None:
    """Read what each node between does; None if one of them is not known."""
    arguments = logits.linear.args
    if logits.linear.kwargs or len(arguments) not in (2, 3):
        return None
    if not isinstance(arguments[1], fx.Node) or len(shape_of(arguments[1])) != 2:
        return None
    of_layer = 1 if logits.adapter is None else len(logits.adapter.nodes)
    for node in logits.nodes[of_layer:]:
        if not (_casts(node) or _computes(node, logits) or _reshapes(node, logits)):
            return None
    return logits


def _casts(node: fx.Node) -> bool:
    """Return whether it casts to float32 what has less, or does nothing."""
    call = torch_call(node)
    assert call is not None
    before, after = (n.meta["example_value"] for n in (node.all_input_nodes[0], node))
    is_wider = before.dtype in (torch.bfloat16, torch.float16) and after.dtype is torch.float32
    return (
        call.name in _CASTS
        and not {"copy", "memory_format"} & call.kwargs.keys()
        and before.device == after.device
        and (before.dtype is after.dtype or is_wider)
    )


def _computes(node: fx.Node, logits: _Logits) -> bool:
    """Take note of a factor, or of `tanh`."""
    call = torch_call(node)
    assert call is not None
    if call.kwargs:
        return False
    if call.name == "tanh" and logits.cap is None:
        logits.cap = 1.0
        return True
    numbers = [a for a in call.args if isinstance(a, float | int) and not isinstance(a, bool)]
    if call.name not in _FACTORS or len(call.args) != 2 or len(numbers) != 1 or not numbers[0]:
        return False
    if call.args[0] is numbers[0] and call.name in ("div", "truediv"):
        return False
    factor = _FACTORS[call.name](numbers[0])
    if not math.isfinite(factor) or (logits.cap is not None and factor <= 0.0):
        return False
    if logits.cap is None:
        logits.factor *= factor
    else:
        logits.cap *= factor
    return True


def _reshapes(node: fx.Node, logits: _Logits) -> bool:
    """Take note of what leaves the rows of logits whole and in order, takes some of them, or makes columns of them."""
    call = torch_call(node)
    assert call is not None
    source = node.all_input_nodes[0]
    before, after = shape_of(source), shape_of(node)
    is_cast = source.meta["example_value"].dtype is not node.meta["example_value"].dtype
    if logits.is_swapped or is_cast:
        return False
    if len(before) == 3 and _swaps_last(node):
        logits.is_swapped = True
        return True
    num_classes = shape_of(logits.linear)[-1]
    is_known = call.name in _SHAPES or (
        call.name == "getitem" and _is_of_tokens(call.args[1], before)
    )
    if not is_known or not after or after[-1] != num_classes or before[-1] != num_classes:
        return False
    logits.shapes.append(node)
    return True


def _swaps_last(node: fx.Node) -> bool:
    """Return whether it swaps the last two of three dims, as cross-entropy wants logits of rows of tokens."""
    call = torch_call(node)
    assert call is not None
    dims = [d for a in call.args[1:] for d in (a if isinstance(a, list | tuple) else (a,))]
    if call.kwargs or not all(isinstance(d, int) for d in dims):
        return False
    if call.name in ("transpose", "swapaxes"):
        return sorted(d % 3 for d in dims) == [1, 2]
    return call.name == "permute" and [d % 3 for d in dims] == [0, 2, 1]


def _is_of_tokens(index: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an index takes whole rows of logits: slices and numbers, none of the last dim."""
    parts = list(index) if isinstance(index, tuple) else [index]
    bounds = [b for p in parts if isinstance(p, slice) for b in (p.start, p.stop, p.step)]
    if not all(p is Ellipsis or isinstance(p, slice | int) for p in parts):
        return False
    if not all(b is None or isinstance(b, int) for b in bounds):
        return False
    num_named = sum(p is not Ellipsis for p in parts)
    if num_named < len(shape) and (Ellipsis not in parts or parts[-1] is Ellipsis):
        return True
    return bool(parts[-1] == slice(None))


def _is_like_eager(
    logits: _Logits,
    loss: fx.Node,
    given: Mapping[str, Any],
    changed: Set[Any],
    grad_enabled: bool,
) -> bool:
    """Return whether the one call, in place of the loss, reads the same numbers and gives the same gradients."""
    operands = [n for layer in logits.linears for n in layer.args if isinstance(n, fx.Node)]
    values: list[Any] = [n.meta.get("example_value") for n in (*operands, *logits.nodes, loss)]
    if not all(isinstance(v, Tensor) and v.is_floating_point() for v in values):
        return False
    if any(v.dtype is torch.float16 for v in values):  # a loss's scale comes before its gradients
        return False
    if not _has_classes(logits, shape_of(given["target"])):
        return False
    if not changed.isdisjoint(map(storage, (*operands, *logits.nodes, given["target"], loss))):
        return False
    if not grad_enabled:
        return True
    needs_grad = any(v.requires_grad for v in values[: len(operands)])
    after = values[len(operands) :]
    if logits.adapter is not None:  # a part of the sum may be frozen
        after = after[len(logits.adapter.nodes) - 1 :]
    return all(v.requires_grad is needs_grad for v in after)


def _has_classes(logits: _Logits, targets: tuple[int, ...]) -> bool:
    """Return whether the classes of the loss are those of the layer, and its logits are many enough."""
    num_classes = shape_of(logits.linear)[-1]
    of_loss = shape_of(logits.nodes[-1])
    rows = (of_loss[0], of_loss[2]) if logits.is_swapped else of_loss[:1]
    is_matched = len(of_loss) == 2 + logits.is_swapped and of_loss[1] == num_classes
    return is_matched and rows == targets and math.prod(of_loss) >= FEWEST_LOGITS


def _join(logits: _Logits, loss: fx.Node, given: Mapping[str, Any], *, is_in_fp8: bool) -> fx.Node:
    """Put the one call in place of the loss, and return it."""
    graph = loss.graph
    first_new = loss.prev
    with graph.inserting_before(loss):
        joined, places = _one_call(logits, loss, given, is_in_fp8=is_in_fp8)
        result = joined
        if places is not None and given.get("reduction") == "none":
            result = graph.call_function(torch.index_select, (joined, 0, places))
        result = reshaped(graph, result, shape_of(loss))
    node = first_new.next
    while node is not loss:
        node.meta.update({k: v for k, v in loss.meta.items() if k != "example_value"})
        node = node.next
    result.meta["example_value"] = loss.meta["example_value"]
    loss.replace_all_uses_with(result)
    before = [n for n in loss.all_input_nodes if n not in logits.nodes]
    graph.erase_node(loss)
    for node in reversed(logits.nodes):
        graph.erase_node(node)
    erase_unused(before)
    return joined


def _one_call(
    logits: _Logits, loss: fx.Node, given: Mapping[str, Any], *, is_in_fp8: bool
) -> tuple[fx.Node, fx.Node | None]:
    """Add the call, and the places of its tokens among the hidden states where a layer in fp8 reads others too."""
    graph = loss.graph
    hidden, weight, *bias = logits.linear.args
    assert isinstance(hidden, fx.Node)
    targets, num_kept = _counted(given["target"])
    targets = reshaped(graph, targets, (-1,))
    settings = {**_settings(logits, loss, given), "num_kept": num_kept}
    places = places_in_whole(graph, hidden, logits.shapes) if is_in_fp8 else None
    if places is not None:
        targets = of_whole(graph, hidden, targets, places, settings["ignore_index"])
    rows = rows_of(graph, hidden, shape_of(hidden)[-1], [] if is_in_fp8 else logits.shapes)
    if (adapter := logits.adapter) is not None:
        low = adapter.up.args[0]
        assert isinstance(low, fx.Node)
        low = rows_of(graph, low, shape_of(low)[-1], logits.shapes)
        if adapter.factor != 1.0:
            low = graph.call_function(torch.mul, (low, adapter.factor))
        rows = graph.call_function(torch.cat, ((rows, low), -1))
    operands = (rows, weight, *(bias or [None]), targets)
    return graph.call_function(linear_cross_entropy, operands, settings), places


def _counted(targets: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return targets, before they were counted if they were, and the count."""
    node = targets
    while (call := torch_call(node)) is not None and call.name in _SHAPES:
        (node,) = node.all_input_nodes
    if node.target is not COUNTED_TARGETS:
        return targets, None
    counted, num_kept = node.args
    assert isinstance(counted, fx.Node)
    assert isinstance(num_kept, fx.Node)
    return counted, num_kept


def _settings(logits: _Logits, loss: fx.Node, given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "reduction": given.get("reduction", "mean"),
        "ignore_index": given.get("ignore_index", -100),
        "label_smoothing": given.get("label_smoothing", 0.0),
        "soft_cap": logits.cap,
        "logit_scale": logits.scale,
        "dtype": logits.linear.meta["example_value"].dtype,
        "loss_dtype": loss.meta["example_value"].dtype,
        **({} if logits.adapter is None else {"adapter": logits.adapter.up.args[1]}),
    }
