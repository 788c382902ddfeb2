"""Captures a module with the first layers of a list of equal ones and the last, and adds the others to the graph.

It is captured with one layer less too: where the two differ in more than that layer, all layers are captured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from thunder_memsave.aten.added_nodes import add_node
from thunder_memsave.aten.equal_layers import row_of
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.capture import Capture, GraphInput, capture
from thunder_memsave.frontend.few_layers.equal_modules import differences
from thunder_memsave.frontend.few_layers.other_guards import (
    guard_others,
    plain_name,
    source_name,
)
from thunder_memsave.frontend.few_layers.other_hooks import HookTable, no_hooks
from thunder_memsave.frontend.few_layers.plain_loops import LayerList, layer_types, longest_list
from thunder_memsave.frontend.few_layers.same_code import (
    Pairing,
    does_as_much_else,
    is_of_known_packages,
    names_elsewhere,
)
from thunder_memsave.frontend.rewrites.nodes import changed_storages

_FIRST = 2
"""Layers that are captured of the first ones, and one of the last; the one before it stands for all between."""
_MODEL = _FIRST - 1
KNOWN_FOLDERS: list[str] = []
"""Folders of code whose layers do the same however many there are, beside those of `same_code.py`: for tests."""
_FEWEST = 16
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
    module: nn.Module, call: Call, *, reason: str, is_guarded: bool, is_of_mode: bool
) -> Capture | None:
    """Return the capture of a whole module; None: it has no long list of equal layers that are called alike.

    Args:
        module: The module whose method is called; nothing of it changes.
        call: The call to trace.
        reason: As for `capture`, and so are the next.
        is_guarded: Whether later calls will be matched against it.
        is_of_mode: Whether the module's mode changes the result.
    """
    found = longest_list(module)
    if found is None or len(found.layers) < _FEWEST or _is_known_elsewhere(module, found):
        return None
    if is_guarded and not is_of_known_packages([found.loop], known=KNOWN_FOLDERS):
        return None
    differing = differences(list(found.layers))
    if differing is None:
        return None
    few = _FewLayers(found, differing, is_guarded=is_guarded)
    try:
        captured = capture(
            module,
            call,
            reason=reason,
            is_guarded=is_guarded,
            is_of_mode=is_of_mode,
            trace=few.trace,
        )
        return _Completed(captured, module, found, few.tables).capture()
    except Exception:
        # Dynamo fails in many ways at what stands for an attribute that differs. The whole module says what cannot be.
        return None


def _is_known_elsewhere(module: nn.Module, found: LayerList) -> bool:
    """Return whether another attribute than that of its owner leads to the list or to one of its layers."""
    layers = found.layers
    ours = {id(layers), *map(id, layers)}
    num_known = 0
    for value in (each for owner in module.modules() for each in vars(owner).values()):
        held = tuple(value.values()) if isinstance(value, dict) else value
        each = held if isinstance(held, (list, tuple, set)) else (held,)
        num_known += sum(id(known) in ours for known in each)
    return num_known != len(ours)


@dataclass(slots=True)
class _FewLayers:
    """Captures a module with few of its layers, and with one less."""

    found: LayerList
    differing: Sequence[Mapping[str, Any]]
    """The attributes in which layers differ, by layer."""
    is_guarded: bool
    tables: Sequence[HookTable] = ()
    """The dictionaries of hooks that must stay empty in each layer, of which no guard asks."""

    def trace(self, trace: Callable[[], Any]) -> Any:
        """Return what Dynamo finds with few layers, with the guards of all."""
        last = len(self.found.layers) - 1
        kept = [*range(_FIRST), last]
        with _unreadable(self.found, kept, self.differing):
            with _shortened(self.found, kept):
                output = trace()
            self._check(output)
            with _shortened(self.found, [i for i in kept if i != _MODEL]):
                fewer = trace()
        self._compare(output, fewer)
        if self.is_guarded:
            self.tables = guard_others(output, self.found.path, _MODEL, _others(self.found))
        return output

    def _check(self, output: Any) -> None:
        """Refuse what need not be captured a second time."""
        codes = output.graph_capture_output.traced_code
        if changed_storages(output.backend_input.graph_module):
            raise _NotAlikeError("values that are changed in place")
        if self.is_guarded and not is_of_known_packages(codes, known=KNOWN_FOLDERS):
            raise _NotAlikeError("layers may pass on what only matters after many")
        if names_elsewhere(codes, self.found.loop, self.found.name):
            raise _NotAlikeError("other code may count the layers")

    def _compare(self, output: Any, fewer: Any) -> None:
        """Refuse what depends on the number of layers."""
        graph, other = (each.backend_input.graph_module.graph for each in (output, fewer))
        made, made_with_fewer = (each.graph_capture_output for each in (output, fewer))
        added, before = (
            [n for n in graph.nodes if not _is_end(n) and _layer_of(n, self.found) == each]
            for each in (_MODEL, _MODEL - 1)
        )
        operands = _operands_of(output, self.found, _MODEL)
        if not Pairing(graph, operands, added, before).equals(other):
            raise _NotAlikeError("the number of layers changes more than their number")
        if not does_as_much_else(made.bytecode, made_with_fewer.bytecode):
            raise _NotAlikeError("layers do more than to compute")


def _others(found: LayerList) -> range:
    """Return the indices of the layers that are not captured."""
    return range(_FIRST, len(found.layers) - 1)


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
    tables: Sequence[HookTable]
    """As those of `_FewLayers`."""

    def capture(self) -> Capture:
        """Add the layers between the first ones and the last."""
        own = self._own_operands()
        before, model, after = segments = self._segments()
        self._check(segments, own)
        inputs = dict(zip(self._placeholders, self.captured.inputs, strict=True))
        given = set(inputs)
        made, at = model, own[-1]
        for layer in _others(self.found):
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
        placeholders = self._placeholders
        weights = [id(inputs[node].tensor) for node in placeholders]
        if len(set(weights)) != len(weights):
            raise _NotAlikeError("layers share weights")
        added = [None if node in given else inputs[node] for node in placeholders]
        return self.captured.with_inputs(
            self.module,
            [inputs[node] for node in placeholders],
            complete=_completion(self.module, added),
            changed=self._changed_unguarded(),
        )

    def _changed_unguarded(self) -> Callable[[], str | None]:
        """Return a function that tells of what no guard asks for, of the types of layers and hooks, what changed."""
        module, path, name = self.module, self.found.path, self.found.name
        owner_path = path.rpartition(".")[0]
        types = layer_types(self.found.owner)
        has_no_hooks = no_hooks(self.tables, [str(i) for i in _others(self.found)])

        def changed() -> str | None:
            try:
                owner = module.get_submodule(owner_path)
            except AttributeError:
                return f"there is no {path} any more"
            if layer_types(owner) != types:
                return "the types of layers in the model's configuration changed"
            if not has_no_hooks(owner._modules.get(name)):
                return f"a module in {path} got a hook, or is another one"
            return None

        return changed

    @property
    def _placeholders(self) -> list[fx.Node]:
        return list(self.captured.graph.graph.find_nodes(op="placeholder"))

    def _own_operands(self) -> list[fx.Node]:
        """Return the operands of the layer that is a model for others, which must be side by side."""
        prefix = f"{self.found.path}.{_MODEL}."
        pairs = list(zip(self._placeholders, self.captured.inputs, strict=True))
        places = [i for i, (_, each) in enumerate(pairs) if each.name.startswith(prefix)]
        if not places or places != list(range(places[0], places[-1] + 1)):
            raise _NotAlikeError("operands of a layer are apart")
        return [pairs[i][0] for i in places]

    def _segments(self) -> list[list[fx.Node]]:
        """Return the nodes of each captured layer, which must be one right after the other."""
        nodes = [n for n in self.captured.graph.graph.nodes if not _is_end(n)]
        layers = [_layer_of(node, self.found) for node in nodes]
        keys = (*range(_FIRST), len(self.found.layers) - 1)
        segments = [
            [n for n, key in zip(nodes, layers, strict=True) if key == each] for each in keys
        ]
        first = nodes.index(segments[0][0]) if segments[0] else 0
        joined = [node for segment in segments for node in segment]
        if not joined or nodes[first : first + len(joined)] != joined:
            raise _NotAlikeError("nodes of a layer are apart")
        return segments

    def _check(self, segments: Sequence[Sequence[fx.Node]], own: Sequence[fx.Node]) -> None:
        """Refuse layers that are not equal, or that others than the next read."""
        graph, placeholders = self.captured.graph.graph, self._placeholders
        index_of = {node: i for i, node in enumerate(placeholders)}
        facts = [_facts(each) for each in self.captured.inputs]
        before, model, after = segments
        row = row_of([model, after], graph, index_of, facts.__getitem__)
        if row is None or len(before) != len(model):
            raise _NotAlikeError("layers differ")
        inside, following = set(model), set(after)
        if any(user not in inside | following for node in model for user in node.users):
            raise _NotAlikeError("others read a layer")
        operands = [placeholders[i] for i in row.operands[0]]
        if set(operands) != set(own) or any(u not in inside for n in own for u in n.users):
            raise _NotAlikeError("a layer reads operands of others")
        last = f"{self.found.path}.{len(self.found.layers) - 1}."
        if any(not self.captured.inputs[i].name.startswith(last) for i in row.operands[1]):
            raise _NotAlikeError("the last layer reads operands of others")

    def _operand(
        self, model: fx.Node, layer: int, inputs: dict[fx.Node, GraphInput], *, after: fx.Node
    ) -> fx.Node:
        """Add the operand of a layer that is as one of the model's."""
        prefix = f"{self.found.path}.{_MODEL}."
        name = f"{self.found.path}.{layer}.{inputs[model].name.removeprefix(prefix)}"
        kind = inputs[model].kind
        tensor = (
            self.module.get_parameter(name) if kind == "parameter" else self.module.get_buffer(name)
        )
        graph = self.captured.graph.graph
        with graph.inserting_after(after):
            node = graph.placeholder(str(model.target).replace(f"_{_MODEL}_", f"_{layer}_"))
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

        def read(node: fx.Node) -> fx.Node:
            return own.get(node) or swaps.get(node, node)

        with graph.inserting_before(begins):
            for node in model:
                args, kwargs = map_arg(node.args, read), map_arg(node.kwargs, read)
                meta = {**node.meta, **self._changed(node, layer)}
                own[node] = add_node(graph, node, args, kwargs, meta)
                made.append(own[node])
        return made

    def _changed(self, node: fx.Node, layer: int) -> dict[str, Any]:
        """Return what is known otherwise of the same node of another layer: its modules."""
        if not (stack := node.meta.get("nn_module_stack")):
            return {}
        in_list, named = _in_list(self.found), f".{self.found.name}.{layer}"
        modules = {
            f"{key}@{layer}": (in_list.sub(lambda _: named, path, count=1), kind)
            for key, (path, kind) in stack.items()
        }
        return {"nn_module_stack": modules}


def _completion(
    module: nn.Module, added: Sequence[GraphInput | None]
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that adds weights and buffers, as they are now, to those that are given (None)."""
    places = [None if each is None else _place(each) for each in added]

    def complete(tensors: Sequence[Tensor]) -> list[Tensor]:
        remaining = iter(tensors)
        return [
            next(remaining) if place is None else _tensor_at(module, *place) for place in places
        ]

    return complete


def _place(given: GraphInput) -> tuple[Sequence[str], str, str]:
    """Return where the module holds a weight or buffer: names of modules, the dictionary in the last, and the key."""
    *path, name = given.name.split(".")
    return path, "_parameters" if given.kind == "parameter" else "_buffers", name


def _tensor_at(module: Any, path: Sequence[str], kind: str, name: str) -> Tensor:
    for child in path:
        module = module._modules[child]
    found: Tensor = module.__dict__[kind][name]
    return found


def _in_list(found: LayerList) -> re.Pattern[str]:
    return re.compile(rf"\.{re.escape(found.name)}\.(\d+)(?=\.|$)")


def _layer_of(node: fx.Node, found: LayerList) -> int | None:
    """Return the index of the layer that a node is in, by its modules."""
    in_list = _in_list(found)
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if match := in_list.search(path):
            return int(match[1])
    return None


def _operands_of(output: Any, found: LayerList, layer: int) -> list[fx.Node]:
    """Return the operands of a layer in the graph that Dynamo found."""
    operands = list(output.backend_input.graph_module.graph.find_nodes(op="placeholder"))
    metadata = output.graph_capture_output.output_graph.export_metadata
    sources = metadata.graph_input_idx_to_local_source
    if sorted(sources) != list(range(len(operands))):
        raise _NotAlikeError("operands of unknown sources")
    name = f"{source_name(found.path, layer)}."
    return [node for i, node in enumerate(operands) if name in plain_name(sources[i])]


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
