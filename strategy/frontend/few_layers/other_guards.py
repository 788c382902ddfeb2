"""Gives Dynamo's capture of few layers the guards of the layers that it did not see.

Each guard asks something of an object that it finds by its source, a path such as `self.model.layers[2].norm.eps`.
Those of a layer that was captured are made again with the paths of the others; PyTorch builds and checks them like its
own. The names used are private to torch, as in `frontend/capture.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import DictGetItemSource
from torch._guards import Guard, Source
from torch.utils.weak import TensorWeakRef

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.frontend.few_layers.other_hooks import HookTable, hook_table

_SELF = "L['self']"
"""Name of the source of the module whose method was captured."""
_PLAIN = (str, int, float, bool, type(None))


class UnknownGuardError(ThunderMemsaveError, ValueError):
    """A guard of a layer cannot be made again for another."""


def guard_others(output: Any, path: str, model: int, others: Iterable[int]) -> list[HookTable]:
    """Add the guards of layers that are as another, but for those that ask if they have hooks.

    Args:
        output: What Dynamo captured.
        path: Dotted name of the list of layers, in the module whose method was captured.
        model: Index of the layer whose guards are known.
        others: Indices of the layers that get them.

    Returns:
        The dictionaries of hooks that must be empty in each of the others.

    Raises:
        UnknownGuardError: A guard of the layer has facts that cannot be read, or there is none.
    """
    graph = output.graph_capture_output.output_graph
    sizes = graph.input_source_to_sizes_strides
    suffix = source_name(path, model)
    layer = _Moves(suffix, "another")
    own = [g for g in graph.guards if any(layer.of(s) is not s for s in _sources(g))]
    of_sizes = [
        (source, facts) for source, facts in sizes.items() if layer.of(source) is not source
    ]
    ordered = graph.guard_on_key_order
    of_ordered = [source for source in ordered if layer.of(source) is not source]
    if not own:
        raise UnknownGuardError(f"no guard of layer {model} of {path} is known")
    tables = {guard: _hook_table(guard, suffix) for guard in own}
    own = [guard for guard in own if tables[guard] is None]
    for other in map(str, others):
        moves = _Moves(suffix, other)
        for guard in own:
            graph.guards.add(_made_again(guard, moves))
        sizes.update({moves.of(source): facts for source, facts in of_sizes})
        ordered.update([moves.of(source) for source in of_ordered])
    return [table for table in tables.values() if table is not None]


def _hook_table(guard: Guard, layer: str) -> HookTable | None:
    """Return the dictionary of hooks that a guard wants to be empty; None: it asks for something else."""
    if guard.create_fn is not GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT:
        return None
    module, _, name = plain_name(guard.originating_source).partition(layer)
    return hook_table(name) if module == _SELF else None


def source_name(path: str, layer: int) -> str:
    """Return the end of the name of a layer's source, as `plain_name` writes it."""
    return "".join(f"._modules['{name}']" for name in (*path.split("."), layer))


def plain_name(source: Source) -> str:
    """Return the name of a source, in which each module is found in the dictionary of its owner."""
    return source.name.replace(".__dict__['_modules']", "._modules")


@dataclasses.dataclass(slots=True)
class _Moves:
    """Makes sources that lead through a layer lead through another one."""

    suffix: str
    """End of the name of the layer that is left."""
    other: str
    """Key of the other."""
    _known: dict[Source, Source | None] = dataclasses.field(default_factory=dict)
    """None: it does not lead through the layer."""

    def of(self, source: Source) -> Source:
        """Return the source through the other layer; the very same if it does not lead through the first."""
        if source not in self._known:
            moved = self._of(source)
            self._known[source] = None if moved is source else moved
        return self._known[source] or source

    def _of(self, source: Source) -> Source:
        if isinstance(source, DictGetItemSource) and plain_name(source).endswith(self.suffix):
            return dataclasses.replace(source, index=self.other)
        moved = {name: self.of(base) for name, base in _bases(source)}
        changed = {name: new for name, new in moved.items() if new is not getattr(source, name)}
        return dataclasses.replace(source, **changed) if changed else source


def _bases(source: Source) -> Iterator[tuple[str, Source]]:
    """Yield the sources that a source is made of, by the names of their fields."""
    for field in dataclasses.fields(source) if dataclasses.is_dataclass(source) else ():
        value = getattr(source, field.name, None)
        if field.init and isinstance(value, Source):
            yield field.name, value


def _sources(guard: Guard) -> list[Source]:
    """Return the sources of a guard: of what it asks about, and of what that is compared with."""
    settings = guard.create_fn.keywords if isinstance(guard.create_fn, functools.partial) else {}
    return [guard.originating_source, *(v for v in settings.values() if isinstance(v, Source))]


def _made_again(guard: Guard, moves: _Moves) -> Guard:
    made = copy.copy(guard)
    made.originating_source = moves.of(guard.originating_source)
    made._hash = None
    if isinstance(guard.create_fn, functools.partial):
        function, settings = guard.create_fn.func, guard.create_fn.keywords
        if guard.create_fn.args:
            raise UnknownGuardError(f"a guard has arguments: {guard.create_fn}")
        moved = {name: _setting(value, function, moves) for name, value in settings.items()}
        made.create_fn = functools.partial(function, **moved)
    return made


def _setting(value: Any, function: Any, moves: _Moves) -> Any:
    if isinstance(value, Source):
        return moves.of(value)
    is_example = isinstance(value, (TensorWeakRef, torch.Tensor))
    if is_example and function is GuardBuilder.TENSOR_MATCH:
        return None  # it takes what its source leads to
    if isinstance(value, _PLAIN):
        return value
    raise UnknownGuardError(f"a guard has a setting of type {type(value).__name__}: {function}")
