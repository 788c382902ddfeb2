"""Simulates the peaks of many plans for one graph, as `order` and `simulate` do, but without building programs.

A plan need not name storages that cannot be recomputed (`Needs.must_keep`): they are kept wherever the plan reads them.
So a search can take storages out of a plan without asking which new reads of such storages that causes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate

from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.order import order, producers
from thunder_memsave.planner.simulate import simulate


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
        self._nbytes = [s.nbytes for s in graph.storages]
        stay = graph.inputs | graph.outputs | graph.cotangents
        self._stay = stay
        self._reads = [tuple(s for s in op.reads if s not in stay) for op in graph.ops]
        self._makes = [tuple(s for s in op.makes if s not in stay) for op in graph.ops]
        self._sources = _sources(graph, stay)
        self._start(memory)

    def __call__(self, keep: Set[int]) -> SimulatedPlan:
        """Simulate the plan that keeps these storages."""
        keep = keep | self._needs.must_keep
        steps, again = self._steps(keep)
        last, read = self._last_reads(steps)
        kept = [s for s in self._needs.storages if s in keep and s in read]
        replayed = [o for o in again if self._graph.ops[o].repeat == "replay"]
        peak = self._backward_peak(steps, last, keep, kept, len(replayed))
        peak = max(*self._forward_during(kept, replayed), peak, self._update_bytes)
        return SimulatedPlan(peak_bytes=peak, again=tuple(again), read=read, kept=frozenset(kept))

    def excess_bytes(self, keep: Set[int], *, over_bytes: float) -> float:
        """Return the bytes above `over_bytes`, summed over all moments: the sum falls before the peak itself does."""
        keep = keep | self._needs.must_keep
        steps, again = self._steps(keep)
        last, read = self._last_reads(steps)
        kept = [s for s in self._needs.storages if s in keep and s in read]
        replayed = [o for o in again if self._graph.ops[o].repeat == "replay"]
        during = self._forward_during(kept, replayed)
        self._backward_peak(steps, last, keep, kept, len(replayed), during)
        return sum(n - over_bytes for n in (*during, self._update_bytes) if n > over_bytes)

    def backward(self, keep: Set[int]) -> SimulatedBackward:
        """Simulate the backward of a plan, step by step."""
        keep = keep | self._needs.must_keep
        steps, again = self._steps(keep)
        last, read = self._last_reads(steps)
        kept = [s for s in self._needs.storages if s in keep and s in read]
        num_states = sum(self._graph.ops[o].repeat == "replay" for o in again)
        during: list[int] = []
        self._backward_peak(steps, last, keep, kept, num_states, during)
        return SimulatedBackward(steps=steps, during=during, last=last)

    def _start(self, memory: StepMemory) -> None:
        """Find the live bytes of forward and at the start of backward if nothing is kept."""
        graph, needs = self._graph, self._needs
        actions = keeping(graph.storages[s].name for s in needs.first)
        profile = simulate(order(graph, actions), memory)
        waiting = [0] * (graph.num_forward + 1)
        for storage in needs.first:
            waiting[needs.last_in_forward[storage] + 1] += self._nbytes[storage]
        self._during, total = [], 0
        for number in range(graph.num_forward):
            total += waiting[number]
            self._during.append(profile.step_peak_bytes[number] - total)
        self._during.append(profile.between_peak_bytes - total - waiting[graph.num_forward])
        kept = sum(self._nbytes[s] for s in needs.first)
        self._before_backward = profile.live_bytes[graph.num_forward] - kept
        self._update_bytes = max(profile.update_peak_bytes, profile.live_bytes[-1])

    def _steps(self, keep: Set[int]) -> tuple[list[tuple[int, bool]], list[int]]:
        """Return the operations of backward, each after those that it needs recomputed, and all recomputed ones."""
        graph, done = self._graph, set[int]()
        steps: list[tuple[int, bool]] = []
        again: list[int] = []
        for number in range(graph.num_forward, len(graph.ops)):
            missing = self._missing(number, keep, done)
            steps += [(op, True) for op in missing]
            again += missing
            steps.append((number, False))
        return steps, again

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

    def _last_reads(
        self, steps: Sequence[tuple[int, bool]]
    ) -> tuple[dict[int, int], frozenset[int]]:
        last: dict[int, int] = {}
        for index, (op, _) in enumerate(steps):
            for storage in self._reads[op]:
                last[storage] = index
        return last, frozenset(last)

    def _forward_during(self, kept: Sequence[int], replayed: Sequence[int]) -> list[int]:
        waiting = [0] * (self._graph.num_forward + 1)
        for storage in kept:
            if storage not in self._offloaded:
                waiting[self._needs.last_in_forward[storage] + 1] += self._nbytes[storage]
        for op in replayed:
            waiting[op + 1] += self._state_bytes
        return [d + total for d, total in zip(self._during, accumulate(waiting), strict=True)]

    def _backward_peak(
        self,
        steps: Sequence[tuple[int, bool]],
        last: dict[int, int],
        keep: Set[int],
        kept: Sequence[int],
        num_states: int,
        during: list[int] | None = None,
    ) -> int:
        graph, nbytes, gradients = self._graph, self._nbytes, self._graph.gradients
        change = [0] * (len(steps) + 1)
        for storage in kept:
            if storage not in gradients:
                change[last[storage]] -= nbytes[storage]
        here = sum(nbytes[s] for s in kept if s not in self._offloaded)
        live = self._before_backward + here + num_states * self._state_bytes
        arriving = self._arriving(steps, kept)
        peak = 0
        for index, (op, is_again) in enumerate(steps):
            live += arriving.get(index, 0)
            now = live + graph.ops[op].peak_bytes
            peak = max(peak, now)
            if during is not None:
                during.append(now)
            for storage in self._makes[op]:
                if storage in gradients and not is_again:
                    live += nbytes[storage]
                elif not (is_again and storage in keep):
                    read = last.get(storage, -1)
                    if read > index:
                        live += nbytes[storage]
                        change[read] -= nbytes[storage]
            if is_again and graph.ops[op].repeat == "replay":
                live -= self._state_bytes
            live += change[index]
        return peak

    def _arriving(self, steps: Sequence[tuple[int, bool]], kept: Sequence[int]) -> dict[int, int]:
        """Return the bytes that are copied back before each step, by its index."""
        waiting = {s for s in kept if s in self._offloaded}
        found: dict[int, int] = {}
        for index, (op, _) in enumerate(steps):
            if not waiting:
                break
            for storage in self._reads[op]:
                if storage in waiting:
                    waiting.discard(storage)
                    found[index] = found.get(index, 0) + self._nbytes[storage]
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
