"""Rewrites the attention calls of a captured graph so that kernels see what a mask means, and no mask is made.

Flash kernels take no mask, and one of (length, length) costs as many bytes. Yet transformers makes one under Dynamo for
every model, because it may not look at values there, and then repeats the heads of keys and values. In a graph, what
the mask is made of can be looked at:

    mask = arange(8)[None, :] <= arange(8)[:, None]
    keys = k[:, :, None].expand(1, 2, 4, 8, 16).reshape(1, 8, 8, 16)            # values alike
    scaled_dot_product_attention(q, keys, values, attn_mask=mask)

becomes `scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)`, and a mask made by `packed_mask` gives
way to its boundaries. That of a sliding window gives way to its number on CUDA, where a kernel takes one. All other
masks, such as those of padding, stay.
"""

from __future__ import annotations

import logging
import operator
from collections import defaultdict
from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from thunder_memsave.frontend.aliasing import storage
from thunder_memsave.frontend.fx_nodes import node_callable
from thunder_memsave.frontend.opaque import is_random
from thunder_memsave.frontend.rewrites.mask_intervals import intervals
from thunder_memsave.frontend.rewrites.nodes import (
    erase_unused,
    is_pure,
    shape_of,
)
from thunder_memsave.ops.families.packed_attention import PACKED_MASK, packed_attention
from thunder_memsave.ops.families.windowed_attention import windowed_attention
from thunder_memsave.ops.location import module_name

_log = logging.getLogger(__name__)

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_OF_THE_MASK = ("boundaries", "num_rows", "length", "window")
_OTHER_MASK = "has a mask, neither causal nor of a window or packed rows, so that no flash kernel for CUDA takes it,"
_LARGEST = 2**30
"""Elements of a mask that is made to be looked at, which needs a few bytes of the host's memory for each."""
_KEPT = 2**16
"""Elements up to which a value is not computed again for each that reads it."""


def simplify_attention(
    graph: fx.GraphModule, *, changed: Set[Any], target: torch.device | None = None
) -> None:
    """Replace masks that kernels know, and repeated heads, by what they mean, and erase what made them.

    Args:
        graph: The graph.
        changed: The storages that it changes in place, from `changed_storages`.
        target: The device of every tensor, for a plan; None: each tensor's own.
    """
    constants = _Constants(changed)
    masked: dict[str, list[str]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        before = node.all_input_nodes
        if reason := _simplify(node, constants, target):
            place = module_name(node.meta.get("nn_module_stack")) or "a function"
            masked[reason].append(place)
        erase_unused(before)
    for reason, places in masked.items():
        _log.info("attention %s in %s", reason, ", ".join(places))


def _simplify(node: fx.Node, constants: _Constants, target: torch.device | None) -> str:
    """Return why the call still has a mask; empty: no kernel needs one."""
    call = {**dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    mask = call.pop("attn_mask", None)
    if isinstance(mask, fx.Node):
        if (boundaries := _boundaries(mask, call)) is not None:
            node.target = packed_attention
            call.pop("is_causal", None)
            call |= boundaries
        elif call.get("is_causal") or (window := constants.window(mask, _length(call))) is None:
            return _OTHER_MASK
        elif window == _length(call):
            call["is_causal"] = True
        elif _device_type(call, target) == "cuda":
            node.target = windowed_attention
            call.pop("is_causal", None)
            call |= {"attn_mask": mask, "window": window}
        else:
            return (
                f"has a mask, because its window of {window} positions is a kernel's only on CUDA,"
            )
    call = _without_repeats(call)
    node.args = tuple(call.pop(name) for name in ("query", "key", "value"))
    node.kwargs = call
    return ""


def _device_type(call: dict[str, Any], target: torch.device | None) -> str:
    device: torch.device = target or call["query"].meta["example_value"].device
    return device.type


def _boundaries(mask: fx.Node, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the boundaries and the window of a mask of packed rows, if they are the rows of queries and of keys."""
    if mask.target is not PACKED_MASK or call.get("is_causal"):
        return None
    given = {**dict(zip(_OF_THE_MASK, mask.args, strict=False)), **mask.kwargs}
    rows, window = [given["num_rows"], given["length"]], given.get("window")
    shapes = [shape_of(call[name]) for name in ("query", "key")]
    if not all([s[0], s[-2]] == rows and len(s) == 4 for s in shapes):
        return None
    boundaries = {"boundaries": given["boundaries"]}
    return boundaries if window is None else {**boundaries, "window": window}


def _length(call: dict[str, Any]) -> int:
    """Return the number of queries; -1 if there are not as many keys."""
    query, key = (call[name].meta["example_value"].shape[-2] for name in ("query", "key"))
    return query if query == key else -1


def _without_repeats(call: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the keys' and values' own heads, if each was repeated for several queries."""
    own = [_repeated(call[name]) for name in ("key", "value")]
    # A single head of queries may be meant for all keys.
    has_all_heads = shape_of(call["query"])[-3:-2] == shape_of(call["key"])[-3:-2]
    if None in own or call.get("enable_gqa") or not has_all_heads:
        return call
    return {**call, "key": own[0], "value": own[1], "enable_gqa": True}


def _repeated(heads: fx.Node) -> fx.Node | None:
    """Return x of `x[:, :, None].expand(...).reshape(...)` that repeats each of its heads; None if it is another."""
    if not (expanded := _operand(heads, "reshape")) or not (spread := _operand(expanded, "expand")):
        return None
    own = _with_new_dimension(spread)
    if own is None or (shape := shape_of(own)) is None or len(shape) != 4:
        return None
    (rows, num_heads, length, width), num_repeats = shape, shape_of(expanded)[2]
    is_repeat = (
        shape_of(spread) == (rows, num_heads, 1, length, width)
        and shape_of(expanded) == (rows, num_heads, num_repeats, length, width)
        and shape_of(heads) == (rows, num_heads * num_repeats, length, width)
    )
    return own if is_repeat else None


def _operand(node: fx.Node | None, method: str) -> fx.Node | None:
    """Return the tensor whose method a node calls; None if it calls another."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target != method:
        return None
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _with_new_dimension(node: fx.Node) -> fx.Node | None:
    """Return x of `x[:, :, None]` or `x.unsqueeze(2)`."""
    if node.target is operator.getitem and isinstance(own := node.args[0], fx.Node):
        index = node.args[1]
        if not isinstance(index, tuple) or index[2:3] != (None,):
            return None
        return own if all(i == slice(None) for i in (*index[:2], *index[3:])) else None
    own = _operand(node, "unsqueeze")
    return own if own is not None and node.args[1:] == (2,) else None


class _Constants:
    """Computes those tensors of a graph that depend on none of its inputs."""

    def __init__(self, changed: Set[Any]) -> None:
        self._changed = changed
        self._known: dict[fx.Node, Tensor | None] = {}
        self._windows: dict[tuple[fx.Node, int], int | None] = {}

    def window(self, mask: fx.Node, length: int) -> int | None:
        """Return how many positions a mask lets each of `length` attend to: itself and those just before it.

        `length`: it is causal. None: it is another mask.
        """
        if (mask, length) not in self._windows:
            self._windows[mask, length] = self._band(mask, length)
        return self._windows[mask, length]

    def _band(self, mask: fx.Node, length: int) -> int | None:
        example = mask.meta["example_value"]
        if example.dtype is not torch.bool or tuple(example.shape[-2:]) != (length, length):
            return None
        found = intervals(mask, length, is_known=self._is_known, value=self._value)
        if found is not None:
            return found.window()
        if example.numel() > _LARGEST or (value := self._value(mask)) is None:
            return None
        masks = value.reshape(-1, length, length)
        if (window := int(masks[0, -1].sum())) == 0:
            return None
        band = torch.ones(length, length, dtype=torch.bool).tril_().triu_(1 - window)
        return window if all(torch.equal(each, band) for each in masks) else None

    def _value(self, node: fx.Node) -> Tensor | None:
        if node in self._known:
            return self._known[node]
        value = self._computed(node)
        if value is None or value.numel() <= _KEPT:
            self._known[node] = value
        return value

    def _computed(self, node: fx.Node) -> Tensor | None:
        """Run the node on the CPU; None if it is no function of constants alone."""
        if not self._is_known(node):
            return None
        operands = {n: self._value(n) for n in node.all_input_nodes}
        if any(v is None for v in operands.values()):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
        args, kwargs = tree_map(_on_cpu, (tuple(args), dict(kwargs)))
        with torch.no_grad():
            return node_callable(node)(*args, **kwargs)  # type: ignore[no-any-return]

    def _is_known(self, node: fx.Node) -> bool:
        """Return whether a node is a function of its operands alone, which nothing changes later."""
        is_changed = storage(node) is None or storage(node) in self._changed
        return not is_changed and is_pure(node) and not is_random(node)


def _on_cpu(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) else value
