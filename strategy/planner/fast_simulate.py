"""Simulates the peaks of many plans for one graph, as `order` and `simulate` do, but without building programs.

A plan need not name storages that cannot be recomputed (`Needs.must_keep`): they are kept wherever the plan reads them.
So a search can take storages out of a plan without asking which new reads of such storages that causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.order import order, producers
from thunder_memsave.planner.simulate import simulate

Numbers: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class SimulatedPlan:
    """The peak of a plan, and its actions."""

    peak_bytes: int
    again: tuple[int, ...]
    """Operations that are recomputed."""
    read: frozenset[int]
    """Storages of forward that backward reads, kept or recomputed."""
    kept: frozenset[int]
    """The storages in `read` that are kept."""


@dataclass(frozen=True, kw_only=True)
class SimulatedBackward:
    """The steps of backward, and the bytes live during each."""

    steps: Sequence[tuple[int, bool]]
    """Operations in order, and whether each is a recomputation."""
    during: Sequence[int]
    """Peak bytes by step."""
    last: Mapping[int, int]
    """The step that reads each storage last."""


class FastSimulation:
    """Simulates plans of one graph; the part that all plans share is simulated once."""

    def __init__(
        self,
        needs: Needs,
        memory: StepMemory,
        generator_state_bytes: int,
        offloaded: Set[int] = frozenset(),
    ) -> None:
        """Simulate the part that no plan changes.

        Args:
            needs: Choices of the graph.
            memory: Bytes that a step holds besides.
            generator_state_bytes: Bytes that forward keeps for each random operation that is recomputed.
            offloaded: Storages that every plan keeps, on the host from forward's last reader to backward's first.
        """
        graph = needs.graph
        self._offloaded = offloaded
        self._graph, self._needs = graph, needs
        self._state_bytes = generator_state_bytes
        self._nbytes = np.array([s.nbytes for s in graph.storages], dtype=np.int64)
        stay = graph.inputs | graph.outputs | graph.cotangents
        self._reads = _Lists([[s for s in op.reads if s not in stay] for op in graph.ops])
        self._makes = _Lists([[s for s in op.makes if s not in stay] for op in graph.ops])
        self._peaks = np.array([op.peak_bytes for op in graph.ops], dtype=np.int64)
        self._replays = np.array([op.repeat == "replay" for op in graph.ops])
        self._is_gradient = _mask(graph.gradients, len(graph.storages))
        self._sources = _sources(graph, stay)
        backward = range(graph.num_forward, len(graph.ops))
        self._reading = [number for number in backward if self._sources[number]]
        """Operations of backward that read what forward makes."""
        self._start(memory)

    def __call__(self, keep: Set[int]) -> SimulatedPlan:
        """Simulate the plan that keeps these storages."""
        plan = self._run(keep)
        peak = max(int(plan.during.max(initial=0)), int(self._forward_during(plan).max()))
        return SimulatedPlan(
            peak_bytes=max(peak, self.update_bytes),
            again=tuple(plan.again),
            read=frozenset(np.flatnonzero(plan.last >= 0).tolist()),
            kept=frozenset(plan.kept),
        )

    def excess_bytes(self, keep: Set[int], *, over_bytes: float) -> float:
        """Return the bytes above `over_bytes`, summed over all moments: the sum falls before the peak itself does."""
        plan = self._run(keep)
        moments = (self._forward_during(plan), plan.during)
        over: list[int] = [n for each in moments for n in each[each > over_bytes].tolist()]
        over += [self.update_bytes] if self.update_bytes > over_bytes else []
        return sum(n - over_bytes for n in over)

    def backward(self, keep: Set[int]) -> SimulatedBackward:
        """Simulate the backward of a plan, step by step."""
        plan = self._run(keep)
        read = np.flatnonzero(plan.last >= 0).tolist()
        return SimulatedBackward(
            steps=[(op, op < self._graph.num_forward) for op in plan.steps.tolist()],
            during=plan.during.tolist(),
            last=dict(zip(read, plan.last[read].tolist(), strict=True)),
        )

    def _run(self, keep: Set[int]) -> _Run:
        keep = keep | self._needs.must_keep
        steps, again = self._steps(keep)
        last = self._last_reads(steps)
        kept = [s for s in self._needs.storages if s in keep and last[s] >= 0]
        during = self._backward_during(steps, last, _mask(keep, len(self._nbytes)), kept)
        return _Run(steps, again, last, kept, during)

    def _start(self, memory: StepMemory) -> None:
        """Find the live bytes of forward and at the start of backward if nothing is kept."""
        graph, needs = self._graph, self._needs
        actions = keeping(graph.storages[s].name for s in needs.first)
        profile = simulate(order(graph, actions), memory)
        waiting = [0] * (graph.num_forward + 1)
        for storage in needs.first:
            waiting[needs.last_in_forward[storage] + 1] += graph.storages[storage].nbytes
        forward = [*profile.step_peak_bytes[: graph.num_forward], profile.between_peak_bytes]
        self._during = np.array(forward, dtype=np.int64) - np.cumsum(waiting, dtype=np.int64)
        kept = sum(graph.storages[s].nbytes for s in needs.first)
        self._before_backward = profile.live_bytes[graph.num_forward] - kept
        self.update_bytes = max(profile.update_peak_bytes, profile.live_bytes[-1])
        """Peak of the optimizer's update, the same with every plan."""

    def _steps(self, keep: Set[int]) -> tuple[Numbers, list[int]]:
        """Return the operations of backward, each after those that it needs recomputed, and all recomputed ones."""
        graph, sources, done = self._graph, self._sources, set[int]()
        steps: list[int] = []
        again: list[int] = []
        begin = graph.num_forward
        for number in self._reading:
            for producer, storage in sources[number]:
                if storage not in keep and producer not in done:
                    missing = self._missing(number, keep, done)
                    steps += [*range(begin, number), *missing]
                    again += missing
                    begin = number
                    break
        steps += range(begin, len(graph.ops))
        return np.array(steps, dtype=np.int64), again

    def _missing(self, number: int, keep: Set[int], done: set[int]) -> list[int]:
        found: list[int] = []
        stack = [number]
        while stack:
            for producer, storage in self._sources[stack.pop()]:
                if storage not in keep and producer not in done:
                    done.add(producer)
                    found.append(producer)
                    stack.append(producer)
        found.sort()
        return found

    def _last_reads(self, steps: Numbers) -> Numbers:
        """Return the step that reads each storage last; -1: none does."""
        last = np.full(len(self._nbytes), -1, dtype=np.int64)
        storages, at = self._reads.of(steps)
        np.maximum.at(last, storages, at)
        return last

    def _forward_during(self, plan: _Run) -> Numbers:
        """Return the peak bytes by operation of forward, and between forward and backward."""
        waiting = np.zeros(self._graph.num_forward + 1, dtype=np.int64)
        for storage in plan.kept:
            if storage not in self._offloaded:
                waiting[self._needs.last_in_forward[storage] + 1] += self._nbytes[storage]
        replayed = np.array(plan.again, dtype=np.int64)
        waiting[replayed[self._replays[replayed]] + 1] += self._state_bytes
        return self._during + np.cumsum(waiting)

    def _backward_during(
        self, steps: Numbers, last: Numbers, keep: Flags, kept: Sequence[int]
    ) -> Numbers:
        """Return the peak bytes by step of backward."""
        is_again = steps < self._graph.num_forward
        frees_state = is_again & self._replays[steps]
        change = np.where(frees_state, -self._state_bytes, 0).astype(np.int64)
        self._add_made(change, steps, last, keep, is_again)
        dying = np.array(kept, dtype=np.int64)
        dying = dying[~self._is_gradient[dying]]
        np.subtract.at(change, last[dying], self._nbytes[dying])
        here = sum(int(self._nbytes[s]) for s in kept if s not in self._offloaded)
        live = self._before_backward + here + int(frees_state.sum()) * self._state_bytes
        before = live + np.cumsum(change) - change
        for step, nbytes in self._arriving(steps, kept).items():
            before[step:] += nbytes
        found: Numbers = before + self._peaks[steps]
        return found

    def _add_made(
        self, change: Numbers, steps: Numbers, last: Numbers, keep: Flags, is_again: Flags
    ) -> None:
        """Add what each step makes, and take it away after its last reader; gradients stay."""
        made, at = self._makes.of(steps)
        stays = self._is_gradient[made] & ~is_again[at]
        is_read = ~stays & ~(is_again[at] & keep[made]) & (last[made] > at)
        nbytes = self._nbytes[made]
        lives = stays | is_read
        np.add.at(change, at[lives], nbytes[lives])
        np.subtract.at(change, last[made[is_read]], nbytes[is_read])

    def _arriving(self, steps: Numbers, kept: Sequence[int]) -> dict[int, int]:
        """Return the bytes that are copied back before each step, by its index."""
        waiting = {s for s in kept if s in self._offloaded}
        found: dict[int, int] = {}
        if not waiting:
            return found
        for storage, index in zip(*(each.tolist() for each in self._reads.of(steps)), strict=True):
            if storage in waiting:
                waiting.discard(storage)
                found[index] = found.get(index, 0) + int(self._nbytes[storage])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """What a plan does in backward."""

    steps: Numbers
    """Operations in order; those of forward are recomputed."""
    again: list[int]
    last: Numbers
    """The step that reads each storage last; -1: none does."""
    kept: list[int]
    """Storages that are kept and read."""
    during: Numbers
    """Peak bytes by step."""


class _Lists:
    """Lists of numbers, one for each operation, one after the other in an array."""

    def __init__(self, lists: Sequence[Sequence[int]]) -> None:
        self._lengths = np.array([len(each) for each in lists], dtype=np.int64)
        self._begins = np.cumsum(self._lengths) - self._lengths
        self._all = np.array([n for each in lists for n in each], dtype=np.int64)

    def of(self, operations: Numbers) -> tuple[Numbers, Numbers]:
        """Return what is in the lists of operations, and the place of each one's operation among these."""
        lengths = self._lengths[operations]
        at = np.repeat(np.arange(len(operations)), lengths)
        skipped = self._begins[operations] - (np.cumsum(lengths) - lengths)
        return self._all[np.arange(len(at)) + skipped[at]], at


def _mask(numbers: Iterable[int], length: int) -> Flags:
    found = np.zeros(length, dtype=bool)
    found[list(numbers)] = True
    return found


def _sources(graph: TrainingGraph, stay: frozenset[int]) -> list[tuple[tuple[int, int], ...]]:
    """Return, by operation, the operation of forward that made each argument, and the argument's storage."""
    made_by = producers(graph)
    sources = []
    for op in graph.ops:
        found = {
            (made_by[name], graph.storage_of[name]): None
            for name in op.arguments
            if made_by.get(name, graph.num_forward) < graph.num_forward
            and graph.storage_of[name] not in stay
        }
        sources.append(tuple(found))
    return sources
