"""Finds layers of a captured graph that are equal: stretches of one length that repeat, one right after the other.

Two operations are equal that run the same function with the same settings, on values of the same kind: of operands that
are alike, of the same place in their layers, or on the very same value. Names take no part.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten

FEWEST = 6
"""Fewest layers for which it pays: the two at each end are traced, and the others are placed."""
_MOST_LENGTHS = 4
"""Most lengths of a layer that are tried."""
_PLAIN = (bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True)
class EqualLayers:
    """Equal layers of a graph in their order; `equal_layers` finds at least `FEWEST`."""

    nodes: tuple[tuple[fx.Node, ...], ...]
    """Of each layer, aligned."""
    operands: tuple[tuple[int, ...], ...]
    """Of each layer, the indices of the operands that no other reads, aligned."""

    @property
    def cut(self) -> range:
        """Indices of the layers that are not traced."""
        return range(2, len(self.nodes) - 2)

    @cached_property
    def place_of(self) -> Mapping[fx.Node, tuple[int, int]]:
        """By node: the index of its layer, and its place in that."""
        return {n: (i, at) for i, layer in enumerate(self.nodes) for at, n in enumerate(layer)}

    @cached_property
    def instead_of(self) -> Mapping[fx.Node, fx.Node]:
        """By node of a layer that is not traced: the node of layer 1 whose value is as its."""
        pairs = (zip(self.nodes[i], self.nodes[1], strict=True) for i in self.cut)
        return {node: other for layer in pairs for node, other in layer}


def equal_layers(
    graph: fx.Graph, index_of: Mapping[fx.Node, int], facts: Callable[[int], Any]
) -> EqualLayers | None:
    """Find the longest row of equal layers; None: there are fewer than `FEWEST`.

    Args:
        graph: A captured graph.
        index_of: Indices of operands by their nodes.
        facts: Returns what operands that are alike have in common.
    """
    search = _Search(graph, index_of, facts)
    found = max(search.stretches(), key=lambda s: (s.num_nodes, -s.length), default=None)
    return None if found is None else search.layers(found)


def row_of(
    layers: Sequence[Sequence[fx.Node]],
    graph: fx.Graph,
    index_of: Mapping[fx.Node, int],
    facts: Callable[[int], Any],
) -> EqualLayers | None:
    """Return these layers, each right after the one before; None: they are not equal.

    Args:
        layers: The nodes of each, at least two layers.
        graph: As for `equal_layers`, and so are the next.
        index_of: Indices of operands by their nodes.
        facts: Returns what operands that are alike have in common.
    """
    length = len(layers[0])
    if not length or any(len(layer) != length for layer in layers):
        return None
    return _Search(graph, index_of, facts).row(layers[0][0], length, len(layers))


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Nodes `begin` to `begin + num_nodes`, each equal to the one `length` after it, if that is among them."""

    begin: int
    num_nodes: int
    length: int


class _Search:
    def __init__(
        self, graph: fx.Graph, index_of: Mapping[fx.Node, int], facts: Callable[[int], Any]
    ) -> None:
        self._nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        self._at = {node: i for i, node in enumerate(self._nodes)}
        self._index_of, self._facts = index_of, facts
        self._arguments = [tree_flatten((n.args, n.kwargs)) for n in self._nodes]
        self._output = graph.output_node()

    def stretches(self) -> Iterator[_Stretch]:
        """Yield the longest stretch of each likely length of a layer."""
        for length in self._lengths():
            are_equal = (self._is_equal(i, i + length) for i in range(len(self._nodes) - length))
            runs = [(equal, len(list(run))) for equal, run in groupby(are_equal)]
            begins = (sum(n for _, n in runs[:i]) for i in range(len(runs)))
            found = [(n, -begin) for begin, (equal, n) in zip(begins, runs, strict=True) if equal]
            if found and (longest := max(found))[0] >= (FEWEST - 1) * length:
                yield _Stretch(-longest[1], longest[0] + length, length)

    def row(self, first: fx.Node, length: int, count: int) -> EqualLayers | None:
        """Return as many layers from a node on; None: they are not equal."""
        begin = self._at[first]
        end = begin + length * (count - 1)
        if not all(self._is_equal(i, i + length) for i in range(begin, end)):
            return None
        return self.layers(_Stretch(begin, length * count, length))

    def layers(self, stretch: _Stretch) -> EqualLayers | None:
        """Return the layers of a stretch; None: they read more than the layer before and what is in no layer."""
        length, begin = stretch.length, stretch.begin
        count = stretch.num_nodes // length
        nodes = [self._nodes[begin + i * length : begin + (i + 1) * length] for i in range(count)]
        layer_of = {n: i for i, layer in enumerate(nodes) for n in layer}
        everywhere = (*self._nodes, self._output)
        if not all(self._reads_near(n, layer_of, last=count - 1) for n in everywhere):
            return None
        operands = self._operands(nodes, layer_of)
        if operands is None:
            return None
        return EqualLayers(tuple(map(tuple, nodes)), tuple(map(tuple, operands)))

    def _lengths(self) -> list[int]:
        """Return the distances between operations that look alike which explain the most of the graph."""
        places: dict[Any, list[int]] = {}
        for i, node in enumerate(self._nodes):
            value = node.meta.get("example_value")
            shape = tuple(value.shape) if isinstance(value, Tensor) else None
            key = (node.op, node.target, shape, len(node.all_input_nodes))
            places.setdefault(key, []).append(i)
        seen = Counter(b - a for at in places.values() for a, b in pairwise(at))
        likely = [n for n in seen if n * FEWEST <= len(self._nodes)]
        return sorted(likely, key=lambda n: (-n * seen[n], n))[:_MOST_LENGTHS]

    def _is_equal(self, first: int, second: int) -> bool:
        one, other = self._nodes[first], self._nodes[second]
        if (one.op, one.target) != (other.op, other.target):
            return False
        (leaves, tree), (others, other_tree) = self._arguments[first], self._arguments[second]
        if tree != other_tree or not self._is_alike(one, other):
            return False
        length = second - first
        return all(self._reads_alike(a, b, length) for a, b in zip(leaves, others, strict=True))

    def _is_alike(self, one: fx.Node, other: fx.Node) -> bool:
        return are_values_alike(*(n.meta.get("example_value") for n in (one, other)))

    def _reads_alike(self, one: Any, other: Any, length: int) -> bool:
        if not isinstance(one, fx.Node):
            return same_setting(one, other)
        if not isinstance(other, fx.Node):
            return False
        if one is other:
            return True
        if one in self._index_of and other in self._index_of:
            return bool(self._facts(self._index_of[one]) == self._facts(self._index_of[other]))
        at, other_at = self._at.get(one), self._at.get(other)
        return at is not None and other_at is not None and other_at - at == length

    def _reads_near(self, node: fx.Node, layer_of: Mapping[fx.Node, int], *, last: int) -> bool:
        """Return whether a node reads its own layer and the one before, or what is in none; others: the last."""
        layer = layer_of.get(node)
        near = (last,) if layer is None else (layer - 1, layer)
        return all(layer_of.get(a, near[0]) in near for a in node.all_input_nodes)

    def _operands(
        self, layers: Sequence[Sequence[fx.Node]], layer_of: Mapping[fx.Node, int]
    ) -> list[list[int]] | None:
        """Return the operands of each layer, in the order in which they are read; None: they do not match."""
        owned = [
            list(dict.fromkeys(a for n in layer for a in self._own(n, i, layer_of)))
            for i, layer in enumerate(layers)
        ]
        follows: dict[fx.Node, fx.Node] = {}
        for one, other in pairwise(layers):
            for node, same in zip(one, other, strict=True):
                pairs = zip(self._read(node), self._read(same), strict=True)
                changing = ((a, b) for a, b in pairs if a in self._index_of and a is not b)
                if any(follows.setdefault(a, b) is not b for a, b in changing):
                    return None
        for before, after in pairwise(owned):
            if [follows.get(a) for a in before] != after:
                return None
        return [[self._index_of[a] for a in layer] for layer in owned]

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that a node reads, each as often as it does."""
        leaves, _ = self._arguments[self._at[node]]
        return [a for a in leaves if isinstance(a, fx.Node)]

    def _own(self, node: fx.Node, layer: int, layer_of: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
        """Yield the operands that a node reads and no other layer does."""
        for operand in self._read(node):
            if operand in self._index_of and all(layer_of.get(u) == layer for u in operand.users):
                yield operand


def are_values_alike(one: Any, other: Any) -> bool:
    """Return whether two values, or trees of values, are alike but for the numbers of tensors."""
    (leaves, tree), (others, other_tree) = tree_flatten(one), tree_flatten(other)
    return tree == other_tree and all(map(_is_value_alike, leaves, others))


def _is_value_alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return same_setting(one, other)
    return _facts_of(one) == _facts_of(other)


def _facts_of(value: Tensor) -> tuple[Any, ...]:
    is_strided = value.layout is torch.strided
    strides = (value.stride(), value.storage_offset()) if is_strided else None
    return (value.shape, value.dtype, value.device, strides, value.requires_grad)


def same_setting(one: Any, other: Any) -> bool:
    """Return whether two arguments that are no tensors are the same; 1, 1.0 and True are three."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, slice):
        pairs = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return all(same_setting(a, b) for a, b in pairs)
    return isinstance(one, _PLAIN) and bool(operator.eq(one, other))
