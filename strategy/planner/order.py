"""Orders a plan: builds the program that the passes make of a graph and its actions.

A recomputed operation comes right before the first operation of backward that needs it, and those that one operation
needs come in the order of forward; each is recomputed at most once, and its results die after their last use. Kept
storages live from forward to their last use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.graph import Device, Op, Program, Step, Storage, TrainingGraph

CPU_GENERATOR_STATE_BYTES = 5056
"""Bytes of the state of torch's CPU generator."""
_CUDA_GENERATOR_STATE_BYTES = 16  # seed and offset


class OrderError(ThunderMemsaveError, ValueError):
    """Backward needs a value that is neither kept nor can be recomputed."""

    code = None


def order(
    graph: TrainingGraph,
    actions: Actions | None = None,
    *,
    generator_state_bytes: int = CPU_GENERATOR_STATE_BYTES,
) -> Program:
    """Build the program of a plan.

    Args:
        graph: Forward and backward before recomputation.
        actions: By names of storages; backward recomputes what it needs and has no action. None: everything is kept,
            and the program is the graph as it is. Arguments and outputs of forward are live in any case.
        generator_state_bytes: Bytes that forward keeps for each random operation that backward recomputes.

    Returns:
        Steps with new storages for recomputed results, and the storages that die after each.

    Raises:
        OrderError: a name is not one of the graph's, or an operation that cannot be recomputed would have to be.
    """
    _check_names(graph, actions)
    emitted = _Emission(graph, _kept(graph, actions), generator_state_bytes)
    for number in range(graph.num_forward):
        emitted.run(number)
    for number in range(graph.num_forward, len(graph.ops)):
        emitted.run_with_needed(number)
    return emitted.program()


def generator_state_bytes(device: Device) -> int:
    """Return the bytes of the state of a device's generator."""
    return CPU_GENERATOR_STATE_BYTES if device.name == "cpu" else _CUDA_GENERATOR_STATE_BYTES


def producers(graph: TrainingGraph) -> dict[str, int]:
    """Return the index of the operation that makes each value."""
    return {name: n for n, op in enumerate(graph.ops) for name in op.results}


def unrepeatable(graph: TrainingGraph) -> frozenset[int]:
    """Return the storages that cannot be recomputed: those that a `no` operation makes or writes to."""
    return frozenset(
        graph.storage_of[name]
        for op in graph.ops
        if op.repeat == "no"
        for name in op.results
        if name in graph.storage_of
    )


def _check_names(graph: TrainingGraph, actions: Actions | None) -> None:
    unknown = set(actions or ()) - {s.name for s in graph.storages}
    if unknown:
        raise OrderError(
            f"the plan has actions for {_listed(unknown)}, but the graph has no such storages; a plan holds only for "
            "the graph that it was made for: plan again."
        )


def _listed(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first!r} and {len(rest)} more" if rest else repr(first)


def _kept(graph: TrainingGraph, actions: Actions | None) -> frozenset[int]:
    if actions is None:
        return frozenset(range(len(graph.storages)))
    kept = actions.kept
    return frozenset(n for n, s in enumerate(graph.storages) if s.name in kept)


@dataclass(slots=True)
class _Placed:
    """A step whose frees are not known yet."""

    op: Op
    makes: tuple[int, ...]
    is_repeated: bool


@dataclass(slots=True)
class _Emission:
    """The steps so far, and the storages of the values that the next one reads."""

    graph: TrainingGraph
    kept: frozenset[int]
    generator_state_bytes: int
    storages: list[Storage] = field(default_factory=list)
    placed: list[_Placed] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    _now: dict[int, int] = field(default_factory=dict)
    """Storage of the program by the storage of the graph that was recomputed into it."""
    _repeated: set[int] = field(default_factory=set)
    _producer: dict[str, int] = field(default_factory=dict)
    _available: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        graph = self.graph
        self.storages = list(graph.storages)
        self._producer = producers(graph)
        self._available = self.kept | graph.inputs | graph.outputs | graph.cotangents

    def run(self, number: int) -> None:
        """Add an operation as it stands in the graph."""
        op = self.graph.ops[number]
        self._place(op, op.makes, is_repeated=False)

    def run_with_needed(self, number: int) -> None:
        """Add an operation of backward after the operations that it needs recomputed."""
        for needed in sorted(self._missing(number)):
            self._run_again(needed)
        self.run(number)

    def _missing(self, number: int) -> set[int]:
        """Return all operations of forward that must be recomputed before this one can run."""
        found: set[int] = set()
        stack = [number]
        while stack:
            for name in self.graph.ops[stack.pop()].arguments:
                producer = self._producer.get(name, self.graph.num_forward)
                if (
                    producer < self.graph.num_forward
                    and self.graph.storage_of[name] not in self._available
                    and producer not in self._repeated
                    and producer not in found
                ):
                    found.add(producer)
                    stack.append(producer)
        return found

    def _run_again(self, number: int) -> None:
        self._repeated.add(number)
        op = self.graph.ops[number]
        if op.repeat == "no":
            raise OrderError(
                f"backward needs {_listed(op.results)} of {op.symbol} ({op.source or 'an unknown line'}), which the "
                "plan does not keep and which cannot be recomputed; keep it."
            )
        makes = tuple(self._again(s) for s in op.makes)
        self._place(op, makes, is_repeated=True)
        if op.repeat == "replay":
            self.last_use[self._state(number)] = len(self.placed) - 1

    def _again(self, storage: int) -> int:
        """Add a storage for a recomputed result."""
        old = self.graph.storages[storage]
        self.storages.append(replace(old, name=f"{old.name}_again"))
        if storage not in self._available:
            self._now[storage] = len(self.storages) - 1
        return len(self.storages) - 1

    def _state(self, number: int) -> int:
        """Add a storage, made in forward, for the generator state that this operation is recomputed from."""
        name = f"{self.graph.ops[number].results[0]}_state"
        self.storages.append(
            Storage(nbytes=self.generator_state_bytes, kind="activation", name=name)
        )
        placed = self.placed[number]
        placed.makes = (*placed.makes, len(self.storages) - 1)
        return len(self.storages) - 1

    def _place(self, op: Op, makes: tuple[int, ...], *, is_repeated: bool) -> None:
        for storage in op.reads:
            self.last_use[self._now.get(storage, storage)] = len(self.placed)
        for storage in makes:
            self.last_use.setdefault(storage, len(self.placed))
        self.placed.append(_Placed(op, makes, is_repeated))

    def program(self) -> Program:
        """Return all steps, with the storages that die after each."""
        graph = self.graph
        frees: list[list[int]] = [[] for _ in self.placed]
        stay = graph.inputs | graph.outputs | graph.cotangents | graph.gradients
        for storage, last in self.last_use.items():
            if storage not in stay:
                frees[last].append(storage)
        if frees and graph.num_forward < len(graph.ops):
            frees[-1] += sorted((graph.outputs | graph.cotangents) - graph.inputs - graph.gradients)
        return Program(
            storages=tuple(self.storages),
            steps=tuple(
                Step(op=p.op, makes=p.makes, frees=tuple(f), is_repeated=p.is_repeated)
                for p, f in zip(self.placed, frees, strict=True)
            ),
            num_forward=graph.num_forward,
            held=graph.inputs,
            cotangents=graph.cotangents,
        )
