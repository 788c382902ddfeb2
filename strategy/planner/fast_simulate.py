"""Simulates the peak of many plans for one graph, as `order` and `simulate` do, but without making programs.

A plan need not name what nothing gives a second time (`Needs.must_keep`): that is kept wherever the plan reads it. A
search that takes a plan, of which only what it reads is known, and lets it compute more again needs no care then.
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
class QuickResult:
    """What a plan needs."""

    peak_bytes: int
    again: tuple[int, ...]
    """Operations that run a second time."""
    read: frozenset[int]
    """Storages of forward that backward reads, kept or computed again."""
    kept: frozenset[int]
    """Of these, the ones that are kept."""


@dataclass(frozen=True, kw_only=True)
class QuickBackward:
    """What runs in backward, and what that needs."""

    steps: Sequence[tuple[int, bool]]
    """Operations, and whether forward has run them before."""
    during: Sequence[int]
    """Bytes, by step."""
    last: Mapping[int, int]
    """By storage, the step that reads it last."""


class QuickSimulation:
    """What all plans share, and the peak of each."""

    def __init__(
        self,
        needs: Needs,
        memory: StepMemory,
        generator_state_bytes: int,
        *,
        elsewhere_bytes: Sequence[float] | None = None,
    ) -> None:
        """Simulate what no plan changes.

        Args:
            needs: Of the graph.
            memory: What a step holds besides.
            generator_state_bytes: What forward keeps for a random operation that is computed again.
            elsewhere_bytes: Where the graph is a part of another one: what else is live at each position of backward;
                only the peak of backward is of interest then.
        """
        graph = needs.graph
        self._graph, self._needs = graph, needs
        self._state_bytes = generator_state_bytes
        self._elsewhere_bytes = elsewhere_bytes
        self._nbytes = [s.nbytes for s in graph.storages]
        stay = graph.inputs | graph.outputs | graph.cotangents
        self._stay = stay
        self._reads = [tuple(s for s in op.reads if s not in stay) for op in graph.ops]
        self._makes = [tuple(s for s in op.makes if s not in stay) for op in graph.ops]
        self._sources = _sources(graph, stay)
        self._start(memory)

    def __call__(self, keep: Set[int]) -> QuickResult:
        """Simulate the plan that keeps these storages."""
        keep = keep | self._needs.must_keep
        steps, again = self._steps(keep)
        last, read = self._last_reads(steps)
        kept = [s for s in self._needs.storages if s in keep and s in read]
        replayed = [o for o in again if self._graph.ops[o].repeat == "replay"]
        peak = self._backward_peak(steps, last, keep, kept, len(replayed))
        if self._elsewhere_bytes is None:
            peak = max(*self._forward_during(kept, replayed), peak, self._update_bytes)
        return QuickResult(peak_bytes=peak, again=tuple(again), read=read, kept=frozenset(kept))

    def excess_bytes(self, keep: Set[int], *, over_bytes: float) -> float:
        """What a plan needs beyond so much, summed over all moments: it falls before the peak itself does."""
        keep = keep | self._needs.must_keep
        steps, again = self._steps(keep)
        last, read = self._last_reads(steps)
        kept = [s for s in self._needs.storages if s in keep and s in read]
        replayed = [o for o in again if self._graph.ops[o].repeat == "replay"]
        during = self._forward_during(kept, replayed)
        self._backward_peak(steps, last, keep, kept, len(replayed), during)
        return sum(n - over_bytes for n in (*during, self._update_bytes) if n > over_bytes)

    def worst(self, keep: Set[int], *, over_bytes: float) -> list[tuple[int, int]]:
        """When backward needs more than so much, the worst first.

        Positions of backward, and the operations that run again before these; -1 for those of backward themselves.
        """
        backward = self.backward(keep)
        found, position = [], 0
        for (op, is_again), nbytes in zip(backward.steps, backward.during, strict=True):
            if nbytes > over_bytes:
                found.append((nbytes, position, op if is_again else -1))
            position += not is_again
        return [(position, op) for _, position, op in sorted(found, reverse=True)]

    def backward(self, keep: Set[int]) -> QuickBackward:
        """Follow a plan through backward."""
        keep = keep | self._needs.must_keep
        steps, again = self._steps(keep)
        last, read = self._last_reads(steps)
        kept = [s for s in self._needs.storages if s in keep and s in read]
        num_states = sum(self._graph.ops[o].repeat == "replay" for o in again)
        during: list[int] = []
        self._backward_peak(steps, last, keep, kept, num_states, during)
        return QuickBackward(steps=steps, during=during, last=last)

    def _start(self, memory: StepMemory) -> None:
        """Live bytes of forward and at the start of backward when nothing is kept."""
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
        """Operations of backward, each after those that it needs again."""
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
        live = self._before_backward + sum(nbytes[s] for s in kept) + num_states * self._state_bytes
        peak = position = 0
        elsewhere = self._elsewhere_bytes
        for index, (op, is_again) in enumerate(steps):
            now = live + graph.ops[op].peak_bytes
            if elsewhere is not None:
                now += int(elsewhere[position])
                position += not is_again
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


def _sources(graph: TrainingGraph, stay: frozenset[int]) -> list[tuple[tuple[int, int], ...]]:
    """By operation: which of forward made each argument, and in which storage it is."""
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
