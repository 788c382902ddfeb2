"""Adds copies to a program: out after the value is final, back before backward first reads it.

    t1 = gelu(t0)               # the last write to t1's storage
    h1 = copy_out(t1)           # begins a copy to the host, which may run beside what follows
    t2 = mm(t1, w)              # forward's last reader
    wait_copy_out(h1)           # the copy has ended: t1 is freed here, not earlier
    ...
    t1_back = copy_in(h1)       # allocates on the device, and begins a copy back
    wait_copy_in(t1_back)       # it has arrived; the host's memory is given back
    t9 = mm(g, t1_back)

Bytes depend on the order of these operations alone, and not on how long copies take: a copy out that is slow holds up
the wait for it, and so the step, but frees nothing later than the program says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from thunder_memsave.planner.graph import FETCH, Op, Program, Step, Storage

LEAST_BYTES = 2**17
"""Smaller values stay: to begin a copy takes the host as long as to launch several operations."""
COPY_OUT, WAIT_OUT, COPY_IN, WAIT_IN = "copy_out", "wait_copy_out", "copy_in", "wait_copy_in"
"""Names of the four operations in traces and programs."""
_COPIES = frozenset((COPY_OUT, WAIT_OUT, COPY_IN, WAIT_IN))
FETCH_STATES, STORE_STATES, WAIT_STATES = "fetch_states", "store_states", "wait_states"
"""Names of those that copy an optimizer's states, in a backward that updates weights."""


def is_copy(op: Op) -> bool:
    """Tell whether an operation begins a copy to or from the host, or waits for one."""
    return op.symbol in _COPIES


def is_copy_of_states(op: Op) -> bool:
    """Tell whether an operation copies an optimizer's states, or waits for that."""
    return op.symbol in (FETCH_STATES, STORE_STATES, WAIT_STATES)


def runs_beside(op: Op) -> bool:
    """Tell whether an operation copies to or from the host, or waits for that: it takes no time of what computes."""
    return op.symbol == FETCH or is_copy(op) or is_copy_of_states(op)


def with_copies(program: Program, storages: Collection[int]) -> Program:
    """Return the program with some storages on the host from forward's last reader to backward's first one.

    No copy runs beside backward, and none beside forward but where the value is read anyway: so this takes the least
    memory. `place.py` says how much earlier and later copies can run.

    Args:
        program: Of a plan that keeps these storages on the device.
        storages: Indices of storages that forward makes; those that backward does not read stay as they are.
    """
    added = _Added(program)
    uses = _Uses.of(program, frozenset(storages))
    for storage in sorted(uses.first_reader):
        added.add(storage, uses)
    return added.program() if added.is_changed else program


@dataclass(frozen=True, slots=True)
class _Uses:
    """The steps that use some storages."""

    touched: Mapping[int, Sequence[int]]
    """Numbers of the steps of forward that make or read a storage."""
    first_reader: Mapping[int, int]
    """Number of the first step of backward that reads a storage; others are not read there."""

    @classmethod
    def of(cls, program: Program, storages: frozenset[int]) -> _Uses:
        touched: dict[int, list[int]] = {storage: [] for storage in storages}
        first_reader: dict[int, int] = {}
        for number, step in enumerate(program.steps):
            if number < program.num_forward:
                for storage in storages.intersection((*step.op.reads, *step.makes)):
                    touched[storage].append(number)
            else:
                for storage in storages.intersection(step.op.reads):
                    first_reader.setdefault(storage, number)
        return cls(touched, first_reader)


@dataclass(slots=True)
class _Added:
    """Steps to add, by the number of the step of the program before which they come."""

    of: Program
    storages: list[Storage] = field(default_factory=list)
    before: dict[int, list[Step]] = field(default_factory=dict)
    freed_later: dict[int, int] = field(default_factory=dict)
    """The storage that takes the place of another on the device, in backward, and is freed in its stead."""

    def __post_init__(self) -> None:
        self.storages = list(self.of.storages)

    @property
    def is_changed(self) -> bool:
        return bool(self.before)

    def add(self, storage: int, uses: _Uses) -> None:
        """Add the copies of one storage."""
        steps, first_reader, touched = (
            self.of.steps,
            uses.first_reader[storage],
            uses.touched[storage],
        )
        (maker,) = (n for n in touched if storage in steps[n].makes)
        written = [n for n in touched if steps[n].op.repeat == "no" and _writes(steps[n])]
        host, back = self._new(storage, "host", 0), self._new(storage, "back", None)
        nbytes = self.storages[storage].nbytes
        out, freed, arrived = (self.storages[n].name for n in (host, storage, back))
        final = max(maker, *written) if written else maker
        self._put(final + 1, _step(COPY_OUT, freed, out, (storage,), (host,), copied_bytes=nbytes))
        self._put(touched[-1] + 1, _step(WAIT_OUT, out, f"{out}_done", (host,), (), (storage,)))
        copy_in = _step(COPY_IN, out, arrived, (host,), (back,), copied_bytes=nbytes, peak=nbytes)
        self._put(first_reader, copy_in)
        self._put(first_reader, _step(WAIT_IN, arrived, f"{arrived}_done", (back,), (), (host,)))
        self.freed_later[storage] = back

    def program(self) -> Program:
        steps: list[Step] = []
        num_forward = 0
        for number, step in enumerate((*self.of.steps, None)):
            if (
                number == self.of.num_forward
            ):  # what comes before backward's first step may be of both
                out = [
                    s for s in self.before.get(number, ()) if s.op.symbol in (COPY_OUT, WAIT_OUT)
                ]
                steps += out
                num_forward = len(steps)
                steps += [s for s in self.before.get(number, ()) if s not in out]
            else:
                steps += self.before.get(number, ())
            if step is not None:
                frees = tuple(self.freed_later.get(s, s) for s in step.frees)
                steps.append(replace(step, frees=frees) if frees != step.frees else step)
        return replace(
            self.of, storages=tuple(self.storages), steps=tuple(steps), num_forward=num_forward
        )

    def _new(self, storage: int, suffix: str, nbytes: int | None) -> int:
        old = self.storages[storage]
        nbytes = old.nbytes if nbytes is None else nbytes
        self.storages.append(replace(old, name=f"{old.name}_{suffix}", nbytes=nbytes))
        return len(self.storages) - 1

    def _put(self, number: int, step: Step) -> None:
        self.before.setdefault(number, []).append(step)


def _writes(step: Step) -> bool:
    """Tell whether it may write to what it reads: then it makes a name for what it wrote, in no storage of its own."""
    return bool(step.op.results) and not step.makes


def _step(
    symbol: str,
    reads_name: str,
    makes_name: str,
    reads: tuple[int, ...],
    makes: tuple[int, ...],
    frees: tuple[int, ...] = (),
    *,
    copied_bytes: int = 0,
    peak: int = 0,
) -> Step:
    op = Op(
        symbol=symbol,
        index=-1,  # none of the trace's
        arguments=(reads_name,),
        results=(makes_name,),
        reads=reads,
        makes=makes,
        peak_bytes=peak,
        repeat="no",
        copied_bytes=copied_bytes,
    )
    return Step(op=op, makes=makes, frees=frees)
