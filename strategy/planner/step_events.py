"""Turns a program and a step's memory into the allocations and frees of the first two steps of training.

First comes what stays: parameters, buffers, everything else. Then each step: forward, the loss, backward, the update,
which leaves the optimizer's state in the first step, and the end of the gradients. Where gradients accumulate, a step
has two micro-batches; more allocate no more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import count
from typing import Literal

from thunder_memsave.planner.caching_allocator.replay import Allocate, Event, Free
from thunder_memsave.planner.graph import Allocations, Program, Step, StepMemory

NUM_STEPS = 2

Inside = Literal["before", "after"]
"""When an operation allocates what only it needs: before its results, or after them. Plans do not know."""


def training_events(program: Program, memory: StepMemory, *, inside: Inside) -> Iterator[Event]:
    """Yield the allocations and frees of two training steps, all on one stream.

    Args:
        program: The operations as they run, with a backward.
        memory: What a step holds besides.
        inside: Order of the allocations of one operation.
    """
    training = _Training(program, memory, inside)
    yield from training.resident()
    for number in range(NUM_STEPS):
        yield from training.step(number)


class _Training:
    """Remembers what is live, by the names of events."""

    def __init__(self, program: Program, memory: StepMemory, inside: Inside) -> None:
        self._program, self._memory, self._inside = program, memory, inside
        self._names = count()
        self._live: dict[int, Hashable] = {}
        """Names of the program's storages that are live."""
        self._gradients: list[Hashable] = []
        self._updates = _Recorded(self._names)

    def resident(self) -> Iterator[Event]:
        storages = self._program.storages
        for storage in sorted(self._program.held):
            if storages[storage].kind != "batch":
                yield self._allocate(storages[storage].nbytes)
        yield self._allocate(self._memory.other_bytes)
        own = sum(storages[s].nbytes for s in self._accumulated())
        yield self._allocate(max(self._memory.gradient_bytes - own, 0))
        if not self._memory.update_allocations:
            yield self._allocate(self._memory.optimizer_bytes)

    def step(self, number: int) -> Iterator[Event]:
        held = self._program.held
        batch = [s for s in sorted(held) if self._program.storages[s].kind == "batch"]
        yield from map(self._make, batch)
        yield from self._micro_batch(keeps_gradients=True)
        if self._memory.gradient_bytes:
            yield from self._micro_batch(keeps_gradients=False)
        yield from self._update(number)
        yield from map(Free, self._gradients)
        self._gradients.clear()
        yield from map(self._free, batch)

    def _micro_batch(self, *, keeps_gradients: bool) -> Iterator[Event]:
        program = self._program
        kept = self._accumulated() if keeps_gradients else frozenset()
        for number, step in enumerate(program.steps):
            if number == program.num_forward:
                yield from self._loss()
            yield from self._operation(step)
            yield from (self._free(s) for s in step.frees if s not in kept)
        for storage in [s for s in self._live if s not in program.held]:
            if keeps_gradients and program.storages[storage].kind == "gradient":
                self._gradients.append(self._live.pop(storage))
            else:
                yield self._free(storage)

    def _accumulated(self) -> frozenset[int]:
        """Return the gradients that die because they were added to earlier ones."""
        if not self._memory.gradient_bytes:
            return frozenset()
        freed = (s for step in self._program.steps for s in step.frees)
        return frozenset(s for s in freed if self._program.storages[s].kind == "gradient")

    def _operation(self, step: Step) -> Iterator[Event]:
        made_bytes = sum(self._program.storages[s].nbytes for s in step.makes)
        makes = map(self._make, step.makes)
        if step.op.peak_bytes <= made_bytes:
            yield from makes
            return
        own = self._allocate(step.op.peak_bytes - made_bytes)
        if self._inside == "before":
            yield own
            yield from makes
        else:
            yield from makes
            yield own
        yield Free(own.key)

    def _loss(self) -> Iterator[Event]:
        """The caller's loss, which leaves the gradients of the outputs."""
        storages, cotangents = self._program.storages, sorted(self._program.cotangents)
        if not self._memory.loss_allocations:
            own = sum(storages[s].nbytes for s in cotangents)
            alone = self._allocate(max(self._memory.between_bytes - own, 0))
            yield alone
            yield from map(self._make, cotangents)
            yield Free(alone.key)
            return
        loss = _Recorded(self._names)
        yield from loss.events(self._memory.loss_allocations)
        for storage in cotangents:
            left = loss.take(storages[storage].nbytes)
            if left is None:
                yield self._make(storage)
            else:
                self._live[storage] = left.key
        yield from map(Free, loss.names())

    def _update(self, number: int) -> Iterator[Event]:
        """Clipping and the optimizer's update."""
        if self._memory.update_allocations:
            yield from self._updates.events(self._memory.update_allocations[number])
            return
        update = self._allocate(self._memory.update_peak_bytes)
        yield update
        yield Free(update.key)

    def _make(self, storage: int) -> Event:
        allocated = self._allocate(self._program.storages[storage].nbytes)
        self._live[storage] = allocated.key
        return allocated

    def _free(self, storage: int) -> Event:
        return Free(self._live.pop(storage))

    def _allocate(self, nbytes: int) -> Allocate:
        return Allocate(next(self._names), nbytes)


class _Recorded:
    """Replays allocations that were recorded elsewhere, and knows those that are live."""

    def __init__(self, names: Iterator[Hashable]) -> None:
        self._names, self._numbers = names, count(1)
        self._live: dict[int, Allocate] = {}

    def events(self, allocations: Allocations) -> Iterator[Event]:
        for number in allocations:
            if number > 0:
                allocated = Allocate(next(self._names), number)
                self._live[next(self._numbers)] = allocated
                yield allocated
            else:
                yield Free(self._live.pop(-number).key)

    def take(self, nbytes: int) -> Allocate | None:
        """Give up a live allocation of this size, if there is one."""
        found = next((n for n, each in self._live.items() if each.nbytes == nbytes), None)
        return None if found is None else self._live.pop(found)

    def names(self) -> list[Hashable]:
        """Return the names of all that is live."""
        return [each.key for each in self._live.values()]
