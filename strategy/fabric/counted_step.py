"""Counts what a step of a strategy holds beside the model's graph, and moves its optimizers' states to the host."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from torch.optim import Optimizer

from thunder_memsave.budget.offload.offered_updates import OfferedUpdates
from thunder_memsave.budget.offload.part_of_states import States
from thunder_memsave.fabric.accumulation import Accumulation
from thunder_memsave.fabric.forward_module import ForwardModule
from thunder_memsave.measure.step_memory import StepMemoryError, step_memory
from thunder_memsave.ops.accumulation import whole_gradient_bytes
from thunder_memsave.optim.in_backward import KEY, UpdatesInBackward
from thunder_memsave.optim.on_host import Kind, begin_step, num_of_kinds, states_on_host
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.gradients import clip_norm

_log = logging.getLogger(__name__)


@dataclass
class CountedStep:
    """What belongs to the steps of one strategy: collections that it fills, and what its script allocates."""

    modules: Collection[ForwardModule]
    optimizers: Collection[Optimizer]
    accumulation: Accumulation
    updates: UpdatesInBackward
    caller: StepMemory = field(default_factory=StepMemory)

    @property
    def states(self) -> States:
        """The states of the optimizers, which may go to the host."""
        memory = partial(self.memory, True)
        return States(
            memory=memory, move=self._move_states, kinds=lambda: num_of_kinds(self.optimizers)
        )

    @property
    def offered(self) -> OfferedUpdates:
        """The updates of the optimizers, which backward may make."""
        return OfferedUpdates(self._with_updates, self.updates.take)

    def _with_updates(self, on_host: Sequence[Kind]) -> StepMemory | None:
        """Measure a step's memory with updates in backward; None: none are offered, or gradients are accumulated."""
        updates = self.updates
        if updates.is_on or not updates.may_be_taken or self.accumulation.was_used:
            return None
        with suppress(ConfigError, StepMemoryError):
            return self.memory(True, on_host, in_backward=True)
        return None

    def memory(
        self, has_budget: bool, on_host: Sequence[Kind] = (), *, in_backward: bool = False
    ) -> StepMemory:
        """Measure a step's memory with the optimizers so far.

        Args:
            has_budget: Whether plans are limited.
            on_host: The kinds of parameters whose states are counted as on the host, beside those that are there.
            in_backward: Whether to count updates as made in backward.

        Raises:
            StepMemoryError: an optimizer's memory cannot be found; only a warning where there is no budget, or the
                caller counts bytes itself.
            ConfigError: an optimizer's states cannot be on the host.
        """
        clip = partial(clip_norm, max_norm=1.0, error_if_nonfinite=False, data_parallel=None)
        try:
            memory = step_memory(
                list(self.optimizers),
                clip=clip,
                before_clip=begin_step,
                accumulates=self.accumulation.was_used,
                other_bytes=self.caller.other_bytes,
                between_bytes=self.caller.between_bytes,
                loss_allocations=self.caller.loss_allocations,
                change=partial(states_on_host, kinds=on_host) if on_host else None,
                one_by_one=UpdatesInBackward() if in_backward or self.updates.is_on else None,
            )
        except StepMemoryError as error:
            if has_budget and not self.caller.other_bytes:
                raise
            _log.warning("the plan counts no optimizer: %s", error)
            if self.updates.is_on:
                _log.warning("%s has no effect: optimizer.step() updates", KEY)
            memory = self.caller
        return replace(
            memory,
            gradient_bytes=memory.gradient_bytes + self._kept_bytes(),
            states_on_host=tuple(on_host),
        )

    def _move_states(self, kinds: Sequence[Kind]) -> None:
        for optimizer in self.optimizers:
            states_on_host(optimizer, kinds)

    def _kept_bytes(self) -> int:
        """Return the bytes of whole gradients that are kept between micro-batches."""
        if not self.accumulation.was_used:
            return 0
        keeping = [m for m in self.modules if m.unreduced.may_keep]
        return sum(whole_gradient_bytes(m.module.parameters()) for m in keeping)
