"""Places layers in a joint graph of which equal ones were traced: two at each end of a row, the others between them.

The second of the row and the last but one are compared, in forward and in backward. Where they are equal node by node,
all between them are: autograd goes back through one layer as through the next. What is placed is what would have been
traced, node by node and in the same order.

    forward   ... 0 1 [2 3 4 5] 6 7 ...       of a row of 8 layers, those in brackets are placed
    backward  ... 7 6 [5 4 3 2] 1 0 ...
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from thunder_memsave.aten.added_nodes import add_node
from thunder_memsave.aten.equal_layers import EqualLayers, are_values_alike, same_setting
from thunder_memsave.aten.origin import IS_BACKWARD, LAYER, ORIGIN, origin
from thunder_memsave.aten.whole_calls import WHOLE_CALL, WHOLE_CALL_BACKWARD, Rule
from thunder_memsave.errors import ThunderMemsaveError

_Phase = Literal["forward", "backward"]
_Where = tuple[_Phase, int]
"""Phase, and index of the layer in its row."""
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class NotEqualError(ThunderMemsaveError, ValueError):
    """Layers that looked equal are traced differently, or something else reads what only the next layer may."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the nodes at one place of their layers get one argument."""

    kind: Literal["same", "own", "forward", "before", "next", "operand", "call"]
    """The same for all layers; a node of the same phase; of the layer's forward; of the forward of the layer before; of
    the backward of the layer after; an operand of the layer; the number of a whole call."""
    value: Any
    """The argument; or the node's place in its layer; or an alias's target and the operand's place; or the number."""


def place_layers(
    graph: fx.Graph, layers: EqualLayers, *, num_operands: int, rules: list[Rule]
) -> None:
    """Add to a joint graph the layers that were not traced.

    Args:
        graph: Of a function that takes the values of layer 1 for those of the layers that are cut.
        layers: The row.
        num_operands: Number of placeholders before those of the cotangents; the output ends with a gradient of each.
        rules: Of whole calls, to which those of the new layers are added.

    Raises:
        NotEqualError: the graph may not be what the whole function would give, and has not been changed.
    """
    row = _Row(graph, layers, num_operands)
    sources: Mapping[_Phase, list[list[_Source]]] = {
        phase: row.compared(phase, rules) for phase in ("forward", "backward")
    }
    places = row.places_of_gradients()
    placing = _Placing(row, rules)
    placing.add("forward", sources["forward"], layers.cut, after=row.first)
    placing.add("backward", sources["backward"], layers.cut[::-1], after=row.last)
    placing.join(("forward", row.last), sources["forward"], "before")
    placing.join(("backward", row.last), sources["backward"], "before")
    placing.join(("backward", row.first), sources["backward"], "next")
    placing.add_gradients(places)


class _Row:
    """A row of layers in a joint graph, of which two are compared."""

    def __init__(self, graph: fx.Graph, layers: EqualLayers, num_operands: int) -> None:
        self.graph, self.layers, self.num_operands = graph, layers, num_operands
        self.first, self.last = 1, len(layers.nodes) - 2
        self.operands = graph.find_nodes(op="placeholder")[:num_operands]
        self._where = _where_of(graph)
        self.nodes: dict[_Where, list[fx.Node]] = {
            (phase, layer): [] for phase in ("forward", "backward") for layer in self._compared
        }
        self._at: dict[fx.Node, tuple[_Phase, int, int]] = {}
        """Phase, layer, and place in these, of the nodes of both compared layers."""
        self._find()
        self._refuse_far_readers()
        self.aliases = dict(self._aliases())
        self._index_of = {node: key for key, node in self.aliases.items()}
        self._calls: dict[int, int] = {}

    @property
    def _compared(self) -> tuple[int, int]:
        return self.first, self.last

    def _find(self) -> None:
        for where, group in groupby(self.graph.nodes, key=self._where.__getitem__):
            if where not in self.nodes:
                continue
            if self.nodes[where]:
                raise NotEqualError(f"{where} is in parts")
            self.nodes[where] = list(group)
            self._at.update((n, (*where, i)) for i, n in enumerate(self.nodes[where]))

    def _refuse_far_readers(self) -> None:
        """Refuse readers of the compared layers in others than those that are next to them in the whole graph."""
        near: Mapping[_Where, Collection[int | None]] = {
            ("forward", self.first): (self.first, self.last),
            ("forward", self.last): (self.last, self.last + 1, None),
            ("backward", self.last): (self.last, self.first),
            ("backward", self.first): (self.first, self.first - 1, None),
        }
        for node, (phase, layer, _) in self._at.items():
            for user in node.users:
                where = self._where[user]
                is_gradient = phase == "backward" and user.op == "output"
                if not is_gradient and (where and where[1]) not in near[phase, layer]:
                    raise NotEqualError(f"{user} reads {node} of layer {layer}")

    def _aliases(self) -> Iterator[tuple[tuple[Any, int], fx.Node]]:
        """Yield the nodes of operands, and of their aliases outside of the layers: by the alias's target and index."""
        for i, operand in enumerate(self.operands):
            yield (None, i), operand
            for user in reversed(operand.users):
                if user.target in _ALIASES and self._where[user] is None:
                    yield (user.target, i), user

    def compared(self, phase: _Phase, rules: Sequence[Rule]) -> list[list[_Source]]:
        """Return where the nodes of a layer get their arguments."""
        ones, others = (self.nodes[phase, layer] for layer in self._compared)
        if len(ones) != len(others):
            raise NotEqualError(f"{phase} has {len(ones)} and {len(others)} nodes")
        return [self._sources(a, b, rules) for a, b in zip(ones, others, strict=True)]

    def _sources(self, one: fx.Node, other: fx.Node, rules: Sequence[Rule]) -> list[_Source]:
        leaves, tree = tree_flatten((one.args, one.kwargs))
        others, other_tree = tree_flatten((other.args, other.kwargs))
        facts = [(n.op, n.target, [k for k in ORIGIN if k in n.meta]) for n in (one, other)]
        values = (n.meta.get("val") for n in (one, other))
        is_alike = facts[0] == facts[1] and tree == other_tree and are_values_alike(*values)
        if one.op != "call_function" or not is_alike:
            raise NotEqualError(f"{one} is not as {other}")
        pairs, found = list(zip(leaves, others, strict=True)), []
        if one.target in (WHOLE_CALL, WHOLE_CALL_BACKWARD):
            found.append(self._call(*pairs.pop(0), rules))
        return [*found, *(self._source(a, b, self._at[one][0]) for a, b in pairs)]

    def _call(self, number: int, other: int, rules: Sequence[Rule]) -> _Source:
        is_same = self._calls.setdefault(number, other) == other
        if not (is_same and rules[number].is_as(rules[other])):
            raise NotEqualError(f"call {number} is not as call {other}")
        return _Source("call", number)

    def _source(self, one: Any, other: Any, phase: _Phase) -> _Source:
        if one is other and one not in self._at:
            return _Source("same", one)
        if not (isinstance(one, fx.Node) and isinstance(other, fx.Node)):
            if same_setting(one, other):
                return _Source("same", one)
            raise NotEqualError(f"{one} is not {other}")
        found = self._of_layers(one, other, phase) or self._of_operands(one, other)
        if found is None:
            raise NotEqualError(f"{one} is not as {other}")
        return found

    def _of_layers(self, one: fx.Node, other: fx.Node, phase: _Phase) -> _Source | None:
        at, other_at = self._at.get(one), self._at.get(other)
        if at is not None and other_at == (at[0], self.last, at[2]) and at[1] == self.first:
            return _Source("own" if at[0] == phase else "forward", at[2])
        is_before = other_at is not None and other_at[:2] == ("forward", self.first)
        if is_before and self._where[one] == ("forward", self.first - 1):
            return _Source("before", other_at[2])  # type: ignore[index]  # `is_before` says that it is one
        is_next = at is not None and at[:2] == ("backward", self.last)
        if is_next and other_at is None and other.meta.get(IS_BACKWARD) and phase == "backward":
            return _Source("next", at[2])  # type: ignore[index]  # `is_next` says so
        return None

    def _of_operands(self, one: fx.Node, other: fx.Node) -> _Source | None:
        (alias, index), (other_alias, other_index) = (
            self._index_of.get(n, (None, -1)) for n in (one, other)
        )
        own, others = (self.layers.operands[i] for i in self._compared)
        if alias is not other_alias or index not in own or other_index not in others:
            return None
        place = own.index(index)
        return _Source("operand", (alias, place)) if others[place] == other_index else None

    def places_of_gradients(self) -> Mapping[int, int]:
        """Return the places in a layer's backward of the gradients of its operands, by the operands' own places."""
        ones, others = (self.layers.operands[i] for i in self._compared)
        gradients = self.gradients
        found = {}
        for place, (a, b) in enumerate(zip(ones, others, strict=True)):
            pair = [self._at.get(gradients[i], gradients[i]) for i in (a, b)]
            if pair == [None, None]:
                continue
            if not all(isinstance(each, tuple) for each in pair) or pair[0][2] != pair[1][2]:
                raise NotEqualError(f"operands {a} and {b} have other gradients")
            found[place] = pair[0][2]
        if set(self._at) & {g for i, g in enumerate(gradients) if i not in (*ones, *others)}:
            raise NotEqualError("an operand of all layers has its gradient within them")
        return found

    @property
    def gradients(self) -> list[Any]:
        """Nodes of the gradients of all operands; None: there is none."""
        results: Any = self.graph.output_node().args[0]
        return list(results[len(results) - self.num_operands :])


class _Placing:
    """Adds layers to a joint graph."""

    def __init__(self, row: _Row, rules: list[Rule]) -> None:
        self._row, self._rules = row, rules
        self._nodes = dict(row.nodes)
        self._numbers: dict[tuple[int, int], int] = {}
        """Numbers of whole calls, by layer and the number in the first layer that is compared."""

    def add(
        self, phase: _Phase, sources: Sequence[Sequence[_Source]], cut: Sequence[int], *, after: int
    ) -> None:
        """Add one phase of the layers that were cut, in the order of `cut`, after that of another layer."""
        models = self._nodes[phase, self._row.first]
        if not models:
            return
        graph = self._row.graph
        trees = [tree_flatten((model.args, model.kwargs))[1] for model in models]
        with graph.inserting_before(self._nodes[phase, after][-1].next):
            for layer in cut:
                made = self._nodes[phase, layer] = []
                for model, of_model, tree in zip(models, sources, trees, strict=True):
                    read = [self._argument(source, (phase, layer)) for source in of_model]
                    args, kwargs = tree_unflatten(read, tree)
                    made.append(add_node(graph, model, args, kwargs, self._meta(model, layer)))

    def join(self, where: _Where, sources: Sequence[Sequence[_Source]], kind: str) -> None:
        """Let a compared layer read the layer that is now next to it."""
        for node, of_node in zip(self._nodes[where], sources, strict=True):
            if not any(source.kind == kind for source in of_node):
                continue
            leaves, tree = tree_flatten((node.args, node.kwargs))
            read = [
                self._argument(source, where) if source.kind == kind else leaf
                for source, leaf in zip(of_node, leaves, strict=True)
            ]
            node.args, node.kwargs = tree_unflatten(read, tree)

    def add_gradients(self, places: Mapping[int, int]) -> None:
        """Return the gradients of the operands of the layers that were cut."""
        output, layers = self._row.graph.output_node(), self._row.layers
        returned: Any = output.args[0]
        results = list(returned)
        begin = len(results) - self._row.num_operands
        for layer in layers.cut:
            for place, at in places.items():
                results[begin + layers.operands[layer][place]] = self._nodes["backward", layer][at]
        output.args = (results,)

    def _argument(self, source: _Source, where: _Where) -> Any:
        _, layer = where
        if source.kind == "same":
            return source.value
        if source.kind == "call":
            return self._number(source.value, layer)
        if source.kind == "operand":
            alias, place = source.value
            return self._row.aliases[alias, self._row.layers.operands[layer][place]]
        of: Mapping[str, _Where] = {
            "own": where,
            "forward": ("forward", layer),
            "before": ("forward", layer - 1),
            "next": ("backward", layer + 1),
        }
        return self._nodes[of[source.kind]][source.value]

    def _number(self, number: int, layer: int) -> int:
        if (layer, number) not in self._numbers:
            self._numbers[layer, number] = len(self._rules)
            self._rules.append(self._rules[number])
        return self._numbers[layer, number]

    def _meta(self, model: fx.Node, layer: int) -> dict[str, Any]:
        """Return what is known of a node of another layer."""
        place = model.meta.get(LAYER)
        if place is None:
            return dict(model.meta)
        origins = origin(self._row.layers.nodes[layer][place[1]])
        return {**model.meta, **{key: origins[key] for key in origins if key in model.meta}}


def _where_of(graph: fx.Graph) -> dict[fx.Node, _Where | None]:
    """Return where each node is; None: in no layer.

    What autograd adds up between two nodes of backward belongs to the first of them.
    """
    found: dict[fx.Node, _Where | None] = {}
    where: _Where | None = None
    for node in graph.nodes:
        phase: _Phase = "backward" if node.meta.get(IS_BACKWARD) else "forward"
        if LAYER in node.meta:
            place = node.meta[LAYER]
            where = None if place is None else (phase, place[0])
        elif phase == "forward" or node.op == "output" or (where is not None and where[0] != phase):
            where = None
        found[node] = where
    return found
