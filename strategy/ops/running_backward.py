"""What a compiled backward knows while it runs: operations of its trace read it, and leave gradients in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from thunder_memsave.ops.accumulation import UnreducedGradients


class Updates(Protocol):
    """Updates parameters while backward runs."""

    def takes(self, parameter: Tensor) -> bool:
        """Return whether the gradient that comes now is the parameter's only one of this step."""

    def update(self, parameter: Tensor, gradient: Tensor, *, is_shared: bool) -> None:
        """Update a parameter by its gradient, whose memory may be shared with other tensors that are read later."""

    def fetch_states(self, parameter: Tensor) -> None:
        """Begin to copy the states of a parameter to the device, if they are on the host."""

    def store_states(self, parameter: Tensor) -> None:
        """Begin to copy them back to the host, or let them go where the parameter was not updated."""

    def wait_states(self, parameter: Tensor) -> None:
        """Wait for that, and free their memory on the device."""

    def end_copies(self) -> None:
        """Wait for all copies of states that have begun."""


@dataclass(frozen=True, slots=True)
class RunningBackward:
    """One run of a compiled backward."""

    gradients: UnreducedGradients
    """Whole gradients that are kept between micro-batches."""
    parameters: Mapping[str, Tensor]
    """The parameters that get a gradient in this run, by their names in the trace."""
    accumulating: frozenset[str] = frozenset()
    """Those of them to whose `.grad` autograd would add their gradient, and which tells nobody else of it."""
    updates: Updates | None = None
    """Updates those of them whose gradient nothing else waits for; None: `optimizer.step()` does."""
    expected: object = None
    """Tells `updates` of this backward as long as it may run."""
    given: dict[str, Tensor] = field(default_factory=dict)
    """Gradients for autograd, by parameter, which the trace itself does not return."""


_running: ContextVar[RunningBackward] = ContextVar("_running")


@contextmanager
def running(backward: RunningBackward) -> Iterator[None]:
    """Run a compiled backward inside."""
    token = _running.set(backward)
    try:
        yield
    finally:
        _running.reset(token)


def running_backward() -> RunningBackward:
    """Return the backward that runs.

    Raises:
        LookupError: none does.
    """
    return _running.get()
