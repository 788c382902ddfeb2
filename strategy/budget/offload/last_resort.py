"""Says what `auto` lets a plan do where none fits without: copy activations, states or both to the host.

Each without updates in backward (`memory.optimizer_in_backward`), then with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

from torch import Tensor, nn

from thunder_memsave.budget.agreed import largest
from thunder_memsave.budget.offload.offered_updates import OfferedUpdates, most_freed
from thunder_memsave.budget.offload.streamed import streaming
from thunder_memsave.budget.offload.terms import check_states_fit, host_budget, offload_terms
from thunder_memsave.budget.planned_call import Attempt
from thunder_memsave.budget.way_search import Tried
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import HostMemoryError, PlanError
from thunder_memsave.ops.host_copies.weights import keep_on_host, place_of
from thunder_memsave.planner.graph import Device, StepMemory
from thunder_memsave.planner.search.mixes import OffloadTerms
from thunder_memsave.settings.problems import ConfigError

_log = logging.getLogger(__name__)

_MUCH = 0.05
"""Part of what a step needs that updates in backward, which cannot make it fit, must free to be tried for an error."""


@dataclass(frozen=True, slots=True)
class States:
    """The states of a step's optimizers, which may be kept on the host."""

    memory: Callable[[], StepMemory]
    """Returns what a step holds besides if they are; raises ConfigError if an optimizer's cannot be."""
    move: Callable[[], None]
    """Keeps them there from now on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastResort:
    """What may go to the host where no plan fits without."""

    settings: MemoryConfig
    terms: OffloadTerms | None
    """For activations, once no plan without fits; None: the host's memory is not known."""
    states: States
    free_bytes: int | None
    """Memory of the host for this process, before anything is there; None: not known."""
    streams: bool = True
    """Whether frozen weights may go there."""

    @classmethod
    def of(
        cls,
        settings: MemoryConfig,
        device: Device,
        states: States,
        *,
        free_bytes: int | None,
        streams: bool,
    ) -> LastResort | None:
        """Return what `memory.offload: auto` allows on a device; None: nothing, as on the CPU, which is the host.

        `streams`: whether frozen weights may go there, as those that fp8 keeps copies of may not.
        """
        if not settings.may_offload or is_host(device):
            return None
        asked = replace(settings, offload="all")
        terms = None
        with suppress(PlanError):  # the host's memory is not known
            terms = offload_terms(asked, device, free_bytes=free_bytes)
        terms = None if terms is None else replace(terms, is_last_resort=True)
        return cls(
            settings=asked, terms=terms, states=states, free_bytes=free_bytes, streams=streams
        )

    def attempts(self, first: Attempt) -> Iterator[Attempt | None]:
        """Yield a call with more and more on the host: activations, states of optimizers, both; None: it cannot be."""
        yield self._with_activations(first)
        states = self._with_states(first)
        yield states
        yield None if states is None else self._with_activations(states)

    def _with_activations(self, attempt: Attempt) -> Attempt | None:
        return None if self.terms is None else replace(attempt, offload=self.terms)

    def _with_states(self, first: Attempt) -> Attempt | None:
        away = self._memory_without_states()
        return None if away is None else first.with_memory(first.memory.with_update_of(away))

    def _memory_without_states(self) -> StepMemory | None:
        """Return what a step holds besides with its states on the host; None: there are none, or they cannot be."""
        with suppress(ConfigError, HostMemoryError, PlanError):
            away = self.states.memory()
            check_states_fit(self.settings, away.host_bytes, free_bytes=self.free_bytes)
            return away if away.host_bytes else None
        return None

    def make_room(
        self,
        modules: Iterable[nn.Module],
        memory: StepMemory,
        *,
        updates: OfferedUpdates,
        budget_bytes: int,
        data_parallel: DataParallel | None,
    ) -> None:
        """Keep states on the host before they are loaded, if a device cannot hold them beside the rest. A collective.

        Updates in backward, if they free enough, are turned on instead, as the plan will do.

        Args:
            modules: Those that are trained, as they are on this rank.
            memory: What a step holds besides with its states on the device.
            updates: Those that backward may make.
            budget_bytes: Of a step.
            data_parallel: The ranks that must choose the same.
        """
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers()) if not place_of(t)]
        weights = sum(t.nbytes for t in tensors)
        gradients = sum(t.nbytes for t in tensors if t.requires_grad)

        def is_too_much(memory: StepMemory) -> bool:
            nbytes = _at_update(memory, weights=weights, gradients=gradients)
            return bool(largest(int(nbytes > budget_bytes), data_parallel))

        if not is_too_much(memory):
            return
        in_backward = updates.memory(False)
        if in_backward is not None and not is_too_much(in_backward):
            updates.take()
            return
        if not largest(int(self._memory_without_states() is None), data_parallel):
            self._move_states()

    @property
    def host_bytes(self) -> int:
        """Most bytes that weights may take on the host; 0: it is not known."""
        with suppress(PlanError):
            return host_budget(self.settings, free_bytes=self.free_bytes)
        return 0

    def take(self, attempt: Attempt) -> None:
        """Do what an attempt counts on, and say so."""
        if attempt.memory.host_bytes:
            self._move_states()
        if names := attempt.arguments.on_host:
            _move_weights(
                [attempt.arguments.tensors[n] for n in names if n in attempt.arguments.tensors]
            )

    def _move_states(self) -> None:
        self.states.move()
        _log.info(
            "nothing fits with the optimizer's states on the device, so the host keeps them (memory.offload: auto)"
        )


def _move_weights(weights: Sequence[Tensor]) -> None:
    """Keep weights on the host from now on; in a plan there are none."""
    for weight in weights:
        assert isinstance(weight, nn.Parameter)
        keep_on_host(weight, weight.device)
    if weights:
        _log.info(
            "nothing fits with all frozen weights on the device, so the host keeps %s of them (memory.offload: auto)",
            f"{sum(w.nbytes for w in weights):,} bytes",
        )


def best_of(
    first: Attempt,
    resort: LastResort | None,
    best: Callable[[Attempt], Tried],
    about_bytes: Callable[[Attempt], int],
    *,
    updates: OfferedUpdates | None,
    budget_bytes: int | None,
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
        data_parallel: The ranks that must choose the same.
    """
    tries = _Tries(best, updates, budget_bytes, data_parallel)
    for attempt in chain([first], () if resort is None else resort.attempts(first)):
        if largest(int(attempt is None), data_parallel):
            continue
        assert attempt is not None
        if (found := tries.fitting(attempt)) is not None:
            if resort is not None and attempt is not first:
                resort.take(attempt)
            return found
    is_streamed = resort is not None and resort.streams and data_parallel is None
    if resort is not None and budget_bytes is not None and is_streamed:
        with_weights = streaming(
            first, about_bytes, budget_bytes=budget_bytes, host_bytes=resort.host_bytes
        )
        for attempt, lack in with_weights:
            tried = best(attempt)
            if tried.run.more_bytes <= 0:
                resort.take(attempt)
                return tried
            tries.refused.append(tried)
            lack(tried.run.more_bytes)
    return _smallest(tries.refused or [best(tries.hopeless[-1])])


@dataclass(slots=True)
class _Tries:
    """What was tried of one call. All methods are collectives."""

    best: Callable[[Attempt], Tried]
    updates: OfferedUpdates | None
    budget_bytes: int | None
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

    def _in_backward(self, attempt: Attempt, lacking: int) -> Attempt | None:
        """Return the attempt with updates in backward; None: it has none, or they free too little of what lacks."""
        if self.updates is None:
            return None
        freed_bytes, budget_bytes = most_freed(attempt), self.budget_bytes or 0
        is_little = freed_bytes < _MUCH * (budget_bytes + lacking) and freed_bytes < lacking
        if largest(int(is_little), self.data_parallel):
            return None
        other = self.updates.attempt(attempt)
        return None if largest(int(other is None), self.data_parallel) else other

    def _tried(self, attempt: Attempt) -> tuple[Tried | None, int]:
        """Return a plan that fits, or None with the bytes that are lacking."""
        lacking = 0 if self.budget_bytes is None else least_bytes(attempt) - self.budget_bytes
        if largest(int(lacking > 0), self.data_parallel):
            self.hopeless.append(attempt)
            return None, largest(lacking, self.data_parallel)
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


def is_host(device: Device) -> bool:
    """Tell whether a device is the host itself, so that copies to the host save nothing."""
    return device.name == "cpu"


def least_bytes(attempt: Attempt) -> int:
    """Return a lower bound on any plan's peak: weights, gradients, and what else is there while they are updated.

    One that is updated in backward is there with its gradient and its states.
    """
    memory, storages = attempt.memory, attempt.graph.storages
    weights = sum(s.nbytes for s in storages if s.kind in ("parameter", "buffer"))
    gradients = sum(s.nbytes for s in storages if s.kind == "gradient")
    in_backward = (
        storages[attempt.graph.storage_of[name]].nbytes + update.states_bytes + update.peak_bytes
        for name, update in attempt.updated.items()
    )
    at_update = max(
        _at_update(memory, weights=weights, gradients=gradients),
        weights + memory.optimizer_bytes + max(in_backward, default=0),
    )
    return memory.other_bytes + at_update


def _at_update(memory: StepMemory, *, weights: int, gradients: int) -> int:
    """Return the bytes of weights, gradients and states while the optimizer updates."""
    if memory.updates:
        gradients = 0  # each dies where it is made
    held = weights + max(gradients, memory.gradient_bytes) + memory.optimizer_bytes
    return held + memory.update_peak_bytes
