"""Offers a plan to update weights in backward, which frees each gradient there (`optimizer_in_backward: auto`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from thunder_memsave.budget.planned_call import Attempt
from thunder_memsave.optim.on_host import Kind
from thunder_memsave.planner.graph import StepMemory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OfferedUpdates:
    """The updates of a step's optimizers, which backward may make where nothing fits otherwise."""

    memory: Callable[[Sequence[Kind]], StepMemory | None]
    """Returns what a step with such updates holds besides, with the states of parameters of some kinds on the host;
    None: it has none that are not made in backward already, or may have none."""
    turn_on: Callable[[], None]
    """Lets backward make them from now on."""

    def attempt(self, plain: Attempt) -> Attempt | None:
        """Return a call whose backward makes them; None: it cannot."""
        found = self.memory(plain.memory.states_on_host)
        if found is None or not found.updates:
            return None
        attempt = replace(plain, memory=plain.memory.with_update_of(found))
        # Another graph: each gradient dies where it is used.
        attempt = attempt.with_traces(attempt.traces, attempt.arguments)
        return attempt if attempt.updated else None

    def take(self, why: str = "nothing fits with the gradients of all weights at once") -> None:
        """Let backward make them from now on, and say so."""
        self.turn_on()
        _log.info(
            "%s, so backward updates each weight (memory.optimizer_in_backward: auto)",
            why,
        )


def most_freed(attempt: Attempt) -> int:
    """Return the most bytes that updates in backward can free: all gradients, and what the update of all takes."""
    gradients = sum(s.nbytes for s in attempt.graph.storages if s.kind == "gradient")
    return gradients + attempt.memory.update_peak_bytes
