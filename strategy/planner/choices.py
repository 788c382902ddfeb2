"""Finds the choices that a plan has: the activations that backward needs, and the operations that can recompute them.

Everything is about storages and the operations that make them; views are part of their storage. A position is the index
of an operation of backward, counted from its first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thunder_memsave.planner.graph import TrainingGraph
from thunder_memsave.planner.order import unrepeatable

NEVER = 1 << 60


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The part of a graph that plans differ in. Storages and operations are indices into the graph."""

    graph: TrainingGraph
    storages: tuple[int, ...]
    """Storages that backward or a recomputation can read, in the order of forward. Arguments and outputs are left out:
    they are live in every plan."""
    ops: tuple[int, ...]
    """Operations that can be recomputed."""
    producer: Mapping[int, int]
    inputs: Mapping[int, tuple[int, ...]]
    """The `storages` that each operation reads."""
    makes: Mapping[int, tuple[int, ...]]
    """The `storages` that each operation makes."""
    first: Mapping[int, int]
    """Position at which backward itself first reads a storage; missing if only recomputation reads it."""
    last: Mapping[int, int]
    """Position at which backward itself last reads a storage."""
    earliest: Mapping[int, int]
    """First position at which any plan reads a storage, also to recompute others."""
    latest: Mapping[int, int]
    """Last position at which any plan reads a storage only to recompute others."""
    must_keep: frozenset[int]
    """Storages that cannot be recomputed."""
    last_in_forward: Mapping[int, int]
    """The operation of forward that reads a storage last, or makes it."""

    def readers(self, storage: int) -> Sequence[int]:
        """Return the operations that can be recomputed and read this storage."""
        return self._readers.get(storage, ())

    @cached_property
    def _readers(self) -> Mapping[int, Sequence[int]]:
        return _inverted((o, s) for o in self.ops for s in self.inputs[o])


def needs(graph: TrainingGraph) -> Needs:
    """Find the choices of a graph's plans, in time linear in the number of operations."""
    anyway = graph.inputs | graph.outputs | graph.cotangents
    first, last = _read_by_backward(graph, anyway)
    producer = _producers(graph, anyway)
    fixed = unrepeatable(graph)
    found, ops = _reachable(graph, first, producer, fixed)
    storages = tuple(sorted(found, key=producer.__getitem__))
    inputs = {o: tuple(s for s in graph.ops[o].reads if s in found) for o in ops}
    makes = {o: tuple(s for s in graph.ops[o].makes if s in found) for o in ops}
    return Needs(
        graph=graph,
        storages=storages,
        ops=tuple(sorted(ops)),
        producer={s: producer[s] for s in storages},
        inputs=inputs,
        makes=makes,
        first=first,
        last=last,
        earliest=_earliest(sorted(ops, reverse=True), inputs, makes, first),
        latest=_latest(sorted(ops, reverse=True), inputs, makes, first),
        must_keep=frozenset(s for s in storages if s in fixed or producer[s] not in ops),
        last_in_forward=_last_in_forward(graph, found),
    )


def _read_by_backward(
    graph: TrainingGraph, anyway: frozenset[int]
) -> tuple[dict[int, int], dict[int, int]]:
    made = {s for op in graph.ops[: graph.num_forward] for s in op.makes} - anyway
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, op in enumerate(graph.ops[graph.num_forward :]):
        for storage in op.reads:
            if storage in made:
                first.setdefault(storage, position)
                last[storage] = position
    return first, last


def _producers(graph: TrainingGraph, anyway: frozenset[int]) -> dict[int, int]:
    return {
        s: number
        for number, op in enumerate(graph.ops[: graph.num_forward])
        for s in op.makes
        if s not in anyway
    }


def _reachable(
    graph: TrainingGraph,
    first: Iterable[int],
    producer: Mapping[int, int],
    fixed: frozenset[int],
) -> tuple[set[int], set[int]]:
    """Return all storages that recomputing the needed ones can read, and the operations that can be recomputed."""
    storages = set(first)
    ops: set[int] = set()
    stack = list(first)
    while stack:
        storage = stack.pop()
        number = producer[storage]
        if storage in fixed or graph.ops[number].repeat == "no" or number in ops:
            continue
        ops.add(number)
        new = [s for s in graph.ops[number].reads if s in producer and s not in storages]
        storages.update(new)
        stack += new
    return storages, ops


def _earliest(
    ops: Sequence[int],
    inputs: Mapping[int, tuple[int, ...]],
    makes: Mapping[int, tuple[int, ...]],
    first: Mapping[int, int],
) -> dict[int, int]:
    earliest = dict(first)
    for number in ops:
        runs = min((earliest.get(s, NEVER) for s in makes[number]), default=NEVER)
        for storage in inputs[number]:
            earliest[storage] = min(earliest.get(storage, NEVER), runs)
    return earliest


def _latest(
    ops: Sequence[int],
    inputs: Mapping[int, tuple[int, ...]],
    makes: Mapping[int, tuple[int, ...]],
    first: Mapping[int, int],
) -> dict[int, int]:
    latest: dict[int, int] = {}
    for number in ops:
        runs = max((first.get(s, latest.get(s, -1)) for s in makes[number]), default=-1)
        for storage in inputs[number]:
            latest[storage] = max(latest.get(storage, -1), runs)
    return latest


def _last_in_forward(graph: TrainingGraph, storages: set[int]) -> dict[int, int]:
    last: dict[int, int] = {}
    for number, op in enumerate(graph.ops[: graph.num_forward]):
        last.update((s, number) for s in (*op.reads, *op.makes) if s in storages)
    return last


def _inverted(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for value, key in pairs:
        found.setdefault(key, []).append(value)
    return found
