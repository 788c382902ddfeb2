"""Records the time of each step of a compilation, and the number of operations after it."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_memsave.passes.step import Traces


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of one compilation."""

    name: str
    """Name of the step; the first is `capture`, which made the trace."""
    milliseconds: float
    """Those of `plan` are with all that it tried; what it tried last is not done again by the steps after it."""
    num_operations: tuple[int, ...]
    """Bound symbols of the joint trace; after the split those of the forward, the backward, and the backward that
    keeps gradients, as far as there are such."""

    @classmethod
    def of(cls, name: str, seconds: float, traces: Traces) -> StepRecord:
        """Record the traces after a step."""
        counts = tuple(len(trace.bound_symbols) for trace in traces.current)
        return cls(name=name, milliseconds=1e3 * seconds, num_operations=counts)
