"""Orders a plan: the program that the passes make of a graph when backward keeps some storages and nothing else.

An operation that is computed again comes right before the first operation of backward that needs it, after what it
needs itself; it is computed again at most once, and what it makes dies after its last use. Kept storages live from
forward to their last use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from thunder_memsave.planner.graph import Op, Program, Step, Storage, TrainingGraph

CPU_GENERATOR_STATE_BYTES = 5056
"""What torch's generator of the CPU takes; one of CUDA takes 16 (seed and offset)."""


class OrderError(ValueError):
    """Backward needs what is neither kept nor can be computed again."""


def order(
    graph: TrainingGraph,
    keep: Set[str] | None = None,
    *,
    generator_state_bytes: int = CPU_GENERATOR_STATE_BYTES,
) -> Program:
    """Make the program of a plan.

    Args:
        graph: What is computed.
        keep: Names of the storages that forward leaves for backward; None: all that backward reads, in which case
            the program is the graph as it is. Arguments and outputs of forward are there in any case.
        generator_state_bytes: What forward keeps for a random operation that backward computes again.

    Returns:
        Steps with new storages for what is computed again, and the storages that die after each.

    Raises:
        OrderError: a name is not one of the graph's, or an operation that cannot be repeated would have to be.
    """
    _check_names(graph, keep)
    emitted = _Emission(graph, _kept(graph, keep), generator_state_bytes)
    for number in range(graph.num_forward):
        emitted.run(number)
    for number in range(graph.num_forward, len(graph.ops)):
        if number not in emitted.postponed:
            emitted.run_with_needed(number)
    return emitted.program()


def postponed(graph: TrainingGraph) -> frozenset[int]:
    """Operations at the start of backward that depend on no cotangent: they run when their results are needed.

    Thunder's split moves there what only backward reads.
    """
    begins = next(
        (n for n, op in _backward(graph) if not graph.cotangents.isdisjoint(op.reads)),
        len(graph.ops),
    )
    return frozenset(
        n
        for n, op in _backward(graph)
        if n < begins and op.repeat in ("free", "yes") and not _makes_gradient(graph, op)
    )


def producers(graph: TrainingGraph) -> dict[str, int]:
    """The number of the operation that makes each value."""
    return {name: n for n, op in enumerate(graph.ops) for name in op.results}


def unrepeatable(graph: TrainingGraph) -> frozenset[int]:
    """Storages of forward that no repetition gives: what `no` makes, and what is written after it was made."""
    return frozenset(
        graph.storage_of[name]
        for op in graph.ops
        if op.repeat == "no"
        for name in op.results
        if name in graph.storage_of
    )


def _backward(graph: TrainingGraph) -> Iterator[tuple[int, Op]]:
    return ((n, graph.ops[n]) for n in range(graph.num_forward, len(graph.ops)))


def _makes_gradient(graph: TrainingGraph, op: Op) -> bool:
    return any(graph.storage_of.get(name) in graph.gradients for name in op.results)


def _check_names(graph: TrainingGraph, keep: Set[str] | None) -> None:
    unknown = (keep or set()) - {s.name for s in graph.storages}
    if unknown:
        raise OrderError(
            f"the plan keeps {_listed(unknown)}, which the graph has no storages of; a plan is for the graph that it "
            "was made for: plan again."
        )


def _listed(names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{first!r} and {len(rest)} more" if rest else repr(first)


def _kept(graph: TrainingGraph, keep: Set[str] | None) -> frozenset[int]:
    if keep is None:
        return frozenset(range(len(graph.storages)))
    return frozenset(n for n, s in enumerate(graph.storages) if s.name in keep)


@dataclass(slots=True)
class _Placed:
    """A step whose deaths are not known yet."""

    op: Op
    makes: tuple[int, ...]
    is_repeated: bool


@dataclass(slots=True)
class _Emission:
    """Steps so far, and where the values are that the next one reads."""

    graph: TrainingGraph
    kept: frozenset[int]
    generator_state_bytes: int
    postponed: frozenset[int] = frozenset()
    storages: list[Storage] = field(default_factory=list)
    placed: list[_Placed] = field(default_factory=list)
    last_use: dict[int, int] = field(default_factory=dict)
    _now: dict[int, int] = field(default_factory=dict)
    """The program's storage in which a storage of the graph is, where it was computed again."""
    _states: dict[int, int] = field(default_factory=dict)
    _repeated: set[int] = field(default_factory=set)
    _producer: dict[str, int] = field(default_factory=dict)
    _available: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        graph = self.graph
        self.storages = list(graph.storages)
        self._producer = producers(graph)
        self._available = self.kept | graph.inputs | graph.outputs | graph.cotangents
        if len(self.kept) < len(graph.storages):
            self.postponed = frozenset(
                n for n in postponed(graph) if self.kept.isdisjoint(graph.ops[n].makes)
            )

    def run(self, number: int) -> None:
        """Run an operation for the first time."""
        op = self.graph.ops[number]
        self._place(op, op.makes, is_repeated=False)

    def run_with_needed(self, number: int) -> None:
        """Run an operation of backward after what it needs."""
        for needed in self._needed_before(number):
            self._run_late(needed)
        self.run(number)

    def _needed_before(self, number: int) -> Iterator[int]:
        """Numbers of operations to run now, each after those that it needs."""
        stack = [iter(self._missing(number))]
        path = [number]
        while stack:
            needed = next(stack[-1], None)
            if needed is None:
                stack.pop()
                done = path.pop()
                if done != number and done not in self._repeated:
                    self._repeated.add(done)
                    yield done
            elif needed not in self._repeated:
                stack.append(iter(self._missing(needed)))
                path.append(needed)

    def _missing(self, number: int) -> Sequence[int]:
        """Producers of the arguments that are not there."""
        return [
            producer
            for name in self.graph.ops[number].arguments
            if (producer := self._producer.get(name)) is not None
            and (producer < self.graph.num_forward or producer in self.postponed)
            and self.graph.storage_of[name] not in self._available
        ]

    def _run_late(self, number: int) -> None:
        if number in self.postponed:
            self.run(number)
            return
        op = self.graph.ops[number]
        if op.repeat == "no":
            raise OrderError(
                f"backward needs {_listed(op.results)} of {op.symbol} ({op.source or 'an unknown line'}), which the "
                "plan does not keep and which cannot be computed again; keep it."
            )
        makes = tuple(self._again(s) for s in op.makes)
        self._place(op, makes, is_repeated=True)
        if op.repeat == "replay":
            self.last_use[self._state(number)] = len(self.placed) - 1

    def _again(self, storage: int) -> int:
        """A new storage for what is computed again."""
        old = self.graph.storages[storage]
        self.storages.append(replace(old, name=f"{old.name}_again"))
        if storage not in self._available:
            self._now[storage] = len(self.storages) - 1
        return len(self.storages) - 1

    def _state(self, number: int) -> int:
        """A storage, made in forward, for the state that this operation is computed again from."""
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
        """All steps, with what dies after each."""
        graph = self.graph
        frees: list[list[int]] = [[] for _ in self.placed]
        for storage, last in self.last_use.items():
            if storage not in self._stay:
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

    @property
    def _stay(self) -> frozenset[int]:
        graph = self.graph
        return graph.inputs | graph.outputs | graph.cotangents | graph.gradients
