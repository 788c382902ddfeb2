"""Says what `auto` lets a plan do where none fits without: copy activations, states or both to the host."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from torch import Tensor, nn

from thunder_memsave.budget.agreed import largest
from thunder_memsave.budget.offload.offered_updates import OfferedUpdates
from thunder_memsave.budget.offload.part_of_states import States, StatesSize, bytes_of, fewest
from thunder_memsave.budget.offload.terms import check_states_fit, host_budget, offload_terms
from thunder_memsave.budget.planned_call import Attempt
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import HostMemoryError, PlanError
from thunder_memsave.ops.host_copies.weights import keep_on_host, place_of
from thunder_memsave.optim.on_host import Kind
from thunder_memsave.planner.graph import Device, StepMemory
from thunder_memsave.planner.report.offload_shown import shapes_of
from thunder_memsave.planner.search.mixes import OffloadTerms
from thunder_memsave.settings.problems import ConfigError

_log = logging.getLogger(__name__)

_NO_ROOM = 2**62
"""Bytes that are lacking where something cannot be."""


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
    is_choice: bool = False
    """Whether states may go there too where a plan fits without, for a faster step."""

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
        """Return what `memory.offload: auto` or `fastest` allows on a device; None: nothing, as on the CPU, the host.

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
            settings=asked,
            terms=terms,
            states=states,
            free_bytes=free_bytes,
            streams=streams,
            is_choice=settings.offload == "fastest",
        )

    def with_activations(self, attempt: Attempt) -> Attempt | None:
        """Return a call that may copy activations to the host; None: it may not."""
        return None if self.terms is None else replace(attempt, offload=self.terms)

    def with_states(self, attempt: Attempt, kinds: Sequence[Kind]) -> Attempt | None:
        """Return a call with the states of parameters of some kinds on the host; None: they cannot be."""
        with suppress(ConfigError, HostMemoryError, PlanError):
            away = self.states.memory(kinds)
            check_states_fit(self.settings, away.host_bytes, free_bytes=self.free_bytes)
            if away.host_bytes > attempt.memory.host_bytes:
                return attempt.with_memory(attempt.memory.with_update_of(away))
        return None

    def sizes(self, memory: StepMemory) -> Mapping[Kind, StatesSize]:
        """Return about the bytes of the states of each kind that may go to the host; empty: none can."""
        with suppress(ConfigError, PlanError):
            return self.states.sizes(memory)
        return {}

    def fewest(
        self,
        sizes: Mapping[Kind, StatesSize],
        least_bytes: float,
        memory: StepMemory,
        data_parallel: DataParallel | None,
    ) -> tuple[Kind, ...]:
        """Return the kinds whose states are to go so that they free so many bytes; the most that may, if none do.

        A collective: hosts have the room of the one that has the least.

        Args:
            sizes: Of each kind.
            least_bytes: What they are to free.
            memory: Of a step as its states are now.
            data_parallel: The ranks that must choose the same.
        """
        most_bytes = -largest(memory.host_bytes - self.host_bytes, data_parallel)
        return fewest(sizes, least_bytes, most_bytes=most_bytes)

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

        def lacking(memory: StepMemory | None) -> int:
            if largest(int(memory is None), data_parallel):
                return _NO_ROOM
            assert memory is not None
            nbytes = _at_update(memory, weights=weights, gradients=gradients)
            return largest(nbytes - budget_bytes, data_parallel)

        if lacking(memory) <= 0:
            return
        in_backward = lacking(updates.memory(memory.states_on_host))
        sizes = {} if in_backward <= 0 else self.sizes(memory)
        most = self.fewest(sizes, inf, memory, data_parallel)
        is_part = 0 < in_backward <= bytes_of(sizes, most)
        if in_backward <= 0 or is_part:
            updates.take()
        least_bytes = in_backward if is_part else lacking(memory)
        if kinds := self.fewest(sizes, least_bytes, memory, data_parallel):
            self._move_states(kinds)

    @property
    def host_bytes(self) -> int:
        """Most bytes that weights may take on the host; 0: it is not known."""
        with suppress(PlanError):
            return host_budget(self.settings, free_bytes=self.free_bytes)
        return 0

    def take(self, attempt: Attempt, *, is_needed: bool = True) -> None:
        """Do what an attempt counts on, and say so, and whether nothing fits without."""
        if attempt.memory.states_on_host:
            self._move_states(attempt.memory.states_on_host, is_needed=is_needed)
        if names := attempt.arguments.on_host:
            _move_weights(
                [attempt.arguments.tensors[n] for n in names if n in attempt.arguments.tensors]
            )

    def _move_states(self, kinds: Sequence[Kind], *, is_needed: bool = True) -> None:
        self.states.move(kinds)
        _log.info(
            "%s with all of the optimizer's states on the device, so the host keeps those of the weights of %s "
            "(memory.offload: %s)",
            "nothing fits" if is_needed else "a step takes longer",
            shapes_of(kinds),
            "fastest" if self.is_choice else "auto",
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
