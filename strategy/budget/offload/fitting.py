"""Tries a call with more and more on the host (`last_resort.py`) until a plan fits.

Activations without updates in backward (`memory.optimizer_in_backward`), then with them. States with them first: what
backward frees stays where it is, and it hides copies. Of states as few as are lacking, and more where that is faster;
then all beside activations; at last frozen weights, alone and beside activations.

With `memory.offload: fastest` a part of the states is tried where a plan fits without, too: backward, which then
updates their weights, hides copies that make room for activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from thunder_memsave.budget.agreed import largest
from thunder_memsave.budget.offload.last_resort import LastResort, least_bytes
from thunder_memsave.budget.offload.offered_updates import OfferedUpdates, most_freed
from thunder_memsave.budget.offload.part_of_states import StatesSize, bytes_of
from thunder_memsave.budget.offload.streamed import streaming
from thunder_memsave.budget.planned_call import Attempt, step_us
from thunder_memsave.budget.way_search import Tried
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.optim.on_host import Kind
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.graph import Device
from thunder_memsave.planner.offload.engines import CopyRates

_MUCH = 0.05
"""Part of what a step needs that updates in backward, which cannot make it fit, must free to be tried for an error."""
_MOST_PARTS = 4
"""Parts of the states that are tried, beside those that cannot fit, before all of them."""
_MORE = 0.04
"""Part of the budget that the next part of the states frees more than the one before, to see whether it is faster."""
_WORTH = 0.01
"""Part of a step that a larger part of the states must save to be taken instead."""
_MOST_SLOWER = 2
"""Parts that are tried although they do not make a step faster: a larger one may."""
_WORTH_A_CHOICE = 0.002
"""The same where a plan fits without."""


def best_of(
    first: Attempt,
    resort: LastResort | None,
    best: Callable[[Attempt], Tried],
    about_bytes: Callable[[Attempt], int],
    *,
    updates: OfferedUpdates | None,
    budget_bytes: int | None,
    device: Device,
    data_parallel: DataParallel | None,
) -> Tried:
    """Return the first attempt that fits, of those with more and more on the host; else what needs the least.

    Each is tried with updates in backward too, where those could free what is lacking. A collective.

    Args:
        first: The call with nothing there.
        resort: What may go there; None: nothing.
        best: Finds the best way to carry an attempt out.
        about_bytes: Estimates the smallest peak of an attempt.
        updates: Those that backward may make; None: there are none.
        budget_bytes: Of a step; None: no limit.
        device: Its rates tell which part of the states is faster.
        data_parallel: The ranks that must choose the same.
    """
    tries = _Tries(best, about_bytes, updates, budget_bytes, device, data_parallel)
    if (found := tries.fitting(first)) is not None:
        is_choice = resort is not None and resort.is_choice and budget_bytes is not None
        return tries.faster(first, found, resort) if resort is not None and is_choice else found
    if resort is not None and (found := tries.on_host(first, resort)) is not None:
        return found
    if resort is not None and (found := tries.with_weights(first, resort)) is not None:
        return found
    return _smallest(tries.refused or [best(tries.hopeless[-1])])


@dataclass(slots=True)
class _Tries:
    """What was tried of one call. All methods are collectives."""

    best: Callable[[Attempt], Tried]
    about_bytes: Callable[[Attempt], int]
    updates: OfferedUpdates | None
    budget_bytes: int | None
    device: Device
    data_parallel: DataParallel | None
    refused: list[Tried] = field(default_factory=list)
    hopeless: list[Attempt] = field(default_factory=list)
    """Attempts of which no plan can fit."""

    def fitting(self, attempt: Attempt) -> Tried | None:
        """Try an attempt, then with updates in backward; None: neither fits."""
        found, lacking = self._tried(attempt)
        other = self._in_backward(attempt, lacking) if found is None else None
        if self.updates is None or other is None:
            return found
        found, _ = self._tried(other)
        if found is not None:
            self.updates.take()
        return found

    def on_host(self, first: Attempt, resort: LastResort) -> Tried | None:
        """Try a call with more and more on the host: activations, states of optimizers, both; None: nothing fits."""
        attempt = self._agreed(resort.with_activations(first))
        if attempt is not None and (found := self.fitting(attempt)) is not None:
            return found
        sizes = resort.sizes(first.memory)
        if largest(int(not sizes), self.data_parallel):
            return None
        if (found := self._with_part(first, resort, sizes, self.updates)) is not None:
            return found
        if self.updates is not None and (found := self._with_part(first, resort, sizes, None)):
            return found
        most = resort.fewest(sizes, inf, first.memory, self.data_parallel)
        attempt = self._agreed(resort.with_states(first, most))
        both = self._agreed(None if attempt is None else resort.with_activations(attempt))
        found = None if both is None else self.fitting(both)
        if found is not None and both is not None:
            resort.take(both)
        return found

    def with_weights(self, first: Attempt, resort: LastResort) -> Tried | None:
        """Try a call with frozen weights of more and more layers there, then beside activations; None: none fits."""
        if self.budget_bytes is None or not resort.streams:
            return None
        for attempt in (first, self._agreed(resort.with_activations(first))):
            if attempt is not None and (found := self._streaming(attempt, resort)) is not None:
                return found
        return None

    def _streaming(self, first: Attempt, resort: LastResort) -> Tried | None:
        assert self.budget_bytes is not None
        attempts = streaming(
            first,
            lambda attempt: largest(self.about_bytes(attempt), self.data_parallel),
            budget_bytes=self.budget_bytes,
            host_bytes=-largest(-resort.host_bytes, self.data_parallel),
        )
        for attempt, lack in attempts:
            tried = self.best(attempt)
            if tried.run.more_bytes <= 0:
                resort.take(attempt)
                return tried
            self.refused.append(tried)
            lack(tried.run.more_bytes)
        return None

    def faster(self, first: Attempt, found: Tried, resort: LastResort) -> Tried:
        """Return a plan with a part of the states on the host, if a step is faster, or the one that was found.

        Backward must update their weights, so that it hides their copies.
        """
        updates = None if first.memory.updates else self.updates
        if not first.memory.updates and (updates is None or found.attempt.memory.updates):
            return found  # none may be made in backward, or all have to be
        worth_us = _WORTH_A_CHOICE * self._computed_us(first)
        taken: Attempt | None = None
        num_slower = 0
        for attempt in self._larger_parts(first, resort, updates):
            added_us = self._added_us(found)
            if added_us < worth_us or self._least_us(attempt) >= added_us:
                break
            tried, _ = self._tried(attempt)
            if tried is not None and self._step_us(tried) <= self._step_us(found) - worth_us:
                found, taken = tried, attempt
            elif (num_slower := num_slower + 1) == _MOST_SLOWER:
                break
        if taken is not None:
            resort.take(taken, is_needed=False)
            if updates is not None:
                updates.take("copies of its states run beside what it computes")
        return found

    def _larger_parts(
        self, first: Attempt, resort: LastResort, updates: OfferedUpdates | None
    ) -> Iterator[Attempt]:
        """Yield a call with more and more states on the host; with `updates`, backward makes those."""
        sizes = resort.sizes(first.memory)
        if largest(int(not sizes), self.data_parallel):
            return
        freed_bytes = 0
        for _ in range(_MOST_PARTS):
            least_bytes = freed_bytes + int(_MORE * (self.budget_bytes or 0))
            kinds = resort.fewest(sizes, least_bytes, first.memory, self.data_parallel)
            if bytes_of(sizes, kinds) <= freed_bytes:
                return
            freed_bytes = bytes_of(sizes, kinds)
            if (attempt := self._with_states(first, resort, updates, kinds)) is None:
                return
            yield attempt

    def _with_states(
        self,
        first: Attempt,
        resort: LastResort,
        updates: OfferedUpdates | None,
        kinds: Sequence[Kind],
    ) -> Attempt | None:
        """Return a call with the states of some kinds on the host, on all ranks; `updates` are backward's."""
        plain = resort.with_states(first, kinds) if kinds else first
        return self._agreed(plain if updates is None or plain is None else updates.attempt(plain))

    def _step_us(self, tried: Tried) -> int:
        """Return the time of forward and backward but for updates, the most of all ranks."""
        return largest(int(step_us(tried.run.call, self.device)), self.data_parallel)

    def _with_part(
        self,
        first: Attempt,
        resort: LastResort,
        sizes: Mapping[Kind, StatesSize],
        updates: OfferedUpdates | None,
    ) -> Tried | None:
        """Try a call with as few states on the host as are lacking, and more where that is faster.

        With `updates`, backward makes those.
        """
        found: tuple[float, Attempt, Tried] | None = None
        for attempt, see in self._parts(first, resort, sizes, updates):
            if found is not None and self._least_us(attempt) >= found[0]:
                break
            tried, more_bytes = self._tried(attempt)
            see(more_bytes)
            if tried is not None:
                us = self._added_us(tried)
                worth_us = _WORTH * (self._computed_us(attempt) + us)
                if found is not None and us > found[0] - worth_us:
                    break
                found = us, attempt, tried
            elif found is not None:
                break
        if found is None:
            return None
        resort.take(found[1])
        if updates is not None:
            updates.take()
        return found[2]

    def _parts(
        self,
        first: Attempt,
        resort: LastResort,
        sizes: Mapping[Kind, StatesSize],
        updates: OfferedUpdates | None,
    ) -> Iterator[tuple[Attempt, Callable[[int], None]]]:
        """Yield calls with more and more states on the host, each with a function that takes what it lacks."""
        made = partial(self._with_states, first, resort, updates)
        kinds: tuple[Kind, ...] = ()
        lacking, num_tries = self._lacking(made(kinds), by_estimate=True), 0
        more_bytes = 0

        def see(nbytes: int) -> None:
            nonlocal more_bytes
            more_bytes = nbytes

        most = resort.fewest(sizes, inf, first.memory, self.data_parallel)
        while kinds != most:
            least_bytes = inf if num_tries == _MOST_PARTS else lacking
            kinds = resort.fewest(sizes, least_bytes, first.memory, self.data_parallel)
            if (attempt := made(kinds)) is None:
                return
            more_bytes = self._lacking(attempt, by_estimate=True)
            if kinds == most or more_bytes <= 0:
                yield attempt, see
                num_tries += 1
            freed_bytes = bytes_of(sizes, kinds)
            step_bytes = more_bytes if more_bytes > 0 else int(_MORE * (self.budget_bytes or 0))
            lacking = max(lacking, freed_bytes) + max(step_bytes, 1)

    def _added_us(self, tried: Tried) -> float:
        """Return the time that a plan and copies of states add to a step, the same on all ranks."""
        memory = tried.run.call.memory
        after_us = 0.0 if memory.updates else self._states_us(memory.host_bytes)
        return largest(int(tried.run.added_us + after_us), self.data_parallel)

    def _least_us(self, attempt: Attempt) -> float:
        """Return the least time that copies of states add to a step: beside a backward's updates all is hidden."""
        memory = attempt.memory
        hidden_us = self._computed_us(attempt) if memory.updates else 0.0
        copied_us = largest(int(self._states_us(memory.host_bytes)), self.data_parallel)
        return copied_us - hidden_us

    def _computed_us(self, attempt: Attempt) -> float:
        """Return the time of a step that recomputes and waits for nothing."""
        return largest(int(sum(costs_us(attempt.graph, self.device))), self.data_parallel)

    def _states_us(self, nbytes: int) -> float:
        return CopyRates.of(self.device).states_us(nbytes)

    def _agreed(self, attempt: Attempt | None) -> Attempt | None:
        """Return an attempt that all ranks have."""
        return None if largest(int(attempt is None), self.data_parallel) else attempt

    def _lacking(self, attempt: Attempt | None, *, by_estimate: bool = False) -> int:
        """Return the bytes that an attempt lacks at least, or by an estimate; negative: those that are left."""
        if attempt is None or self.budget_bytes is None:
            return 0
        nbytes = least_bytes(attempt)
        if by_estimate:
            nbytes = max(nbytes, self.about_bytes(attempt))
        return largest(nbytes - self.budget_bytes, self.data_parallel)

    def _in_backward(self, attempt: Attempt, lacking: int) -> Attempt | None:
        """Return the attempt with updates in backward; None: it has none, or they free too little of what lacks."""
        if self.updates is None:
            return None
        freed_bytes, budget_bytes = most_freed(attempt), self.budget_bytes or 0
        is_little = freed_bytes < _MUCH * (budget_bytes + lacking) and freed_bytes < lacking
        if largest(int(is_little), self.data_parallel):
            return None
        return self._agreed(self.updates.attempt(attempt))

    def _tried(self, attempt: Attempt) -> tuple[Tried | None, int]:
        """Return a plan that fits, or None with the bytes that are lacking."""
        if (lacking := self._lacking(attempt)) > 0:
            self.hopeless.append(attempt)
            return None, lacking
        tried = self.best(attempt)
        if tried.run.more_bytes <= 0:
            return tried, 0
        self.refused.append(tried)
        return None, tried.run.more_bytes


def _smallest(refused: Sequence[Tried]) -> Tried:
    """Return what needs the least, with a bound that holds for all."""
    found = min(refused, key=lambda each: each.run.more_bytes)
    bounds = [t.offer.bound_bytes for t in refused if t.offer.bound_bytes is not None]
    return replace(found, offer=replace(found.offer, bound_bytes=min(bounds, default=None)))
