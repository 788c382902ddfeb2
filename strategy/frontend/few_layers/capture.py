"""Captures a module with the layers at both ends of a list of equal ones, and adds the others to the graph."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from thunder_memsave.aten.equal_layers import equal_layers
from thunder_memsave.errors import CaptureError, ThunderMemsaveError
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.capture import Capture, GraphInput, capture
from thunder_memsave.frontend.few_layers.equal_modules import differences
from thunder_memsave.frontend.few_layers.plain_loops import LayerList, longest_list
from thunder_memsave.frontend.rewrites.nodes import changed_storages

_AT_EACH_END = 4
_FEWEST = 12
"""Fewest layers for which it pays."""


class _NotAlikeError(ThunderMemsaveError, ValueError):
    """The graph of few layers does not tell what that of all is."""


class _Unread:
    """Stands for an attribute in which layers differ: code that makes use of it cannot be captured."""

    def _refuse(self, *_: Any) -> Any:
        raise _NotAlikeError("layers differ in an attribute that they read")

    __bool__ = __len__ = __iter__ = __index__ = __eq__ = __getitem__ = __contains__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def capture_few_layers(
    module: nn.Module, call: Call, *, reason: str, is_of_mode: bool
) -> Capture | None:
    """Return the capture of a whole module; None: it has no long list of equal layers that are called alike.

    Args:
        module: The module whose method is called; nothing of it changes.
        call: The call to trace.
        reason: As for `capture`, and so is the next.
        is_of_mode: Whether the module's mode changes the result.
    """
    found = longest_list(module)
    if found is None or len(found.layers) < _FEWEST:
        return None
    differing = differences(list(found.layers))
    if differing is None:
        return None
    count = len(found.layers)
    kept = [*range(_AT_EACH_END), *range(count - _AT_EACH_END, count)]
    try:
        with _shortened(found, kept), _unreadable(found, kept, differing):
            captured = capture(module, call, reason=reason, is_guarded=False, is_of_mode=is_of_mode)
        return _Completed(captured, module, found).capture()
    except (CaptureError, _NotAlikeError):  # the whole module says what cannot be captured
        return None


@contextmanager
def _shortened(found: LayerList, kept: Sequence[int]) -> Iterator[None]:
    """Let the list have these layers alone, under the names that they have."""
    layers = found.layers
    whole = layers._modules
    layers._modules = {str(i): whole[str(i)] for i in kept}
    try:
        yield
    finally:
        layers._modules = whole


@contextmanager
def _unreadable(
    found: LayerList, kept: Sequence[int], differing: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Let nothing read the attributes in which layers differ."""
    owners = [
        (vars(found.layers.get_submodule(f"{i}.{dotted}".rpartition(".")[0])), dotted, value)
        for i in kept
        for dotted, value in differing[i].items()
    ]
    for attributes, dotted, _ in owners:
        attributes[dotted.rpartition(".")[2]] = _Unread()
    try:
        yield
    finally:
        for attributes, dotted, value in owners:
            attributes[dotted.rpartition(".")[2]] = value


@dataclass(slots=True)
class _Completed:
    """A capture of few layers that gets all."""

    captured: Capture
    module: nn.Module
    found: LayerList

    def capture(self) -> Capture:
        """Add the layers between the last of the first ones and the first of the last ones."""
        graph = self.captured.graph
        if changed_storages(graph):
            raise _NotAlikeError("values that are changed in place")
        own = self._own_operands()
        before, model, after = self._segments()
        self._check(before, model, after, own)
        last = len(self.found.layers) - _AT_EACH_END
        made = model
        inputs = dict(zip(self._placeholders, self.captured.inputs, strict=True))
        at = own[-1]
        for layer in range(_AT_EACH_END, last):
            operands = {}
            for operand in own:
                at = operands[operand] = self._operand(operand, layer, inputs, after=at)
            swaps = dict(zip(before, made, strict=True))
            swaps |= operands
            made = self._layer(model, swaps, layer, begins=after[0])
        pairs = dict(zip(model, made, strict=True))
        for node in after:
            for read in node.all_input_nodes:
                if read in pairs:
                    node.replace_input_with(read, pairs[read])
        graph.recompile()
        return dataclasses.replace(
            self.captured, inputs=[inputs[node] for node in self._placeholders]
        )

    @property
    def _placeholders(self) -> list[fx.Node]:
        return list(self.captured.graph.graph.find_nodes(op="placeholder"))

    def _own_operands(self) -> list[fx.Node]:
        """Return the operands of the layer that is a model for others, which must be side by side."""
        prefix = f"{self.found.path}.{_AT_EACH_END - 1}."
        pairs = list(zip(self._placeholders, self.captured.inputs, strict=True))
        places = [i for i, (_, each) in enumerate(pairs) if each.name.startswith(prefix)]
        if not places or places != list(range(places[0], places[-1] + 1)):
            raise _NotAlikeError("operands of a layer are apart")
        return [pairs[i][0] for i in places]

    def _segments(self) -> list[list[fx.Node]]:
        """Return the nodes of the layer before the model, of the model, and of the one after it."""
        keys = (_AT_EACH_END - 2, _AT_EACH_END - 1, len(self.found.layers) - _AT_EACH_END)
        nodes = [n for n in self.captured.graph.graph.nodes if not _is_end(n)]
        layers = [self._layer_of(node) for node in nodes]
        segments = [
            [n for n, key in zip(nodes, layers, strict=True) if key == each] for each in keys
        ]
        first = nodes.index(segments[0][0]) if segments[0] else 0
        joined = [node for segment in segments for node in segment]
        if not joined or nodes[first : first + len(joined)] != joined:
            raise _NotAlikeError("nodes of a layer are apart")
        return segments

    def _layer_of(self, node: fx.Node) -> int | None:
        """Return the index of the layer that a node is in, by its modules."""
        paths = (path for path, _ in (node.meta.get("nn_module_stack") or {}).values())
        for path in paths:
            if match := self._in_list.search(path):
                return int(match[1])
        return None

    @property
    def _in_list(self) -> re.Pattern[str]:
        return re.compile(rf"\.{re.escape(self.found.name)}\.(\d+)(?=\.|$)")

    def _check(
        self,
        before: Sequence[fx.Node],
        model: Sequence[fx.Node],
        after: Sequence[fx.Node],
        own: Sequence[fx.Node],
    ) -> None:
        """Refuse layers that are not equal, as `equal_layers` finds them, or that others than the next read."""
        graph, placeholders = self.captured.graph.graph, self._placeholders
        index_of = {node: i for i, node in enumerate(placeholders)}
        facts = [_facts(each) for each in self.captured.inputs]
        row = equal_layers(graph, index_of, facts.__getitem__)
        length = len(model)
        if row is None or len(row.nodes[0]) != length or len(before) != length:
            raise _NotAlikeError("layers differ")
        in_row = [node for layer in row.nodes for node in layer]
        around = [*before, *model, *after]
        first = in_row.index(around[0]) if around[0] in in_row else len(in_row)
        if in_row[first : first + len(around)] != around:
            raise _NotAlikeError("layers differ")
        inside, following = set(model), set(after)
        if any(user not in inside | following for node in model for user in node.users):
            raise _NotAlikeError("others read a layer")
        read = {a for node in model for a in node.all_input_nodes if a in index_of}
        shared = {a for node in after for a in node.all_input_nodes if a in index_of}
        if read - shared != set(own):
            raise _NotAlikeError("a layer reads operands of others")

    def _operand(
        self, model: fx.Node, layer: int, inputs: dict[fx.Node, GraphInput], *, after: fx.Node
    ) -> fx.Node:
        """Add the operand of a layer that is as one of the model's."""
        prefix = f"{self.found.path}.{_AT_EACH_END - 1}."
        name = f"{self.found.path}.{layer}.{inputs[model].name.removeprefix(prefix)}"
        kind = inputs[model].kind
        tensor = (
            self.module.get_parameter(name) if kind == "parameter" else self.module.get_buffer(name)
        )
        graph = self.captured.graph.graph
        with graph.inserting_after(after):
            node = graph.placeholder(
                str(model.target).replace(f"_{_AT_EACH_END - 1}_", f"_{layer}_")
            )
        node.meta = {k: v for k, v in model.meta.items() if k != "grapharg"}
        node.meta |= self._changed(model, layer)
        node.meta["example_value"] = _another(model.meta["example_value"])
        inputs[node] = GraphInput(kind, name, tensor)
        return node

    def _layer(
        self,
        model: Sequence[fx.Node],
        swaps: dict[fx.Node, fx.Node],
        layer: int,
        *,
        begins: fx.Node,
    ) -> list[fx.Node]:
        """Add a layer, and return its nodes."""
        graph, made = self.captured.graph.graph, []
        own: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(begins):
            for node in model:
                new = graph.node_copy(node, lambda n: own.get(n, swaps.get(n, n)))
                new.meta = {**node.meta, **self._changed(node, layer)}
                own[node] = new
                made.append(new)
        return made

    def _changed(self, node: fx.Node, layer: int) -> dict[str, Any]:
        """Return what is known otherwise of the same node of another layer: its modules."""
        if not (stack := node.meta.get("nn_module_stack")):
            return {}
        named = f".{self.found.name}.{layer}"
        modules = {
            f"{key}@{layer}": (self._in_list.sub(lambda _: named, path, count=1), kind)
            for key, (path, kind) in stack.items()
        }
        return {"nn_module_stack": modules}


def _is_end(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output")


def _facts(given: GraphInput) -> tuple[Any, ...]:
    t = given.tensor
    return (given.kind, type(t), t.shape, t.dtype, t.device, t.stride(), t.requires_grad)


def _another(example: Tensor) -> Tensor:
    """Return a fake tensor like another, in memory of its own."""
    mode: Any = example.fake_mode  # type: ignore[attr-defined]  # Dynamo's are fake
    with mode:
        found = torch.empty_strided(
            example.shape, example.stride(), dtype=example.dtype, device=example.device
        )
    return found.requires_grad_(example.requires_grad)
