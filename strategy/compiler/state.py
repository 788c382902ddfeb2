"""Holds what flows through the list of steps: a call's traces, and the facts that no step changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from thunder.core.trace import TraceCtx
from thunder.extend import Executor

from thunder_memsave.budget.arguments import Arguments
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.cuda_graphs.choose import CudaGraphs
from thunder_memsave.frontend.lowering import Lowered
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.ops.accumulation import UnreducedGradients
from thunder_memsave.optim.in_backward import UpdatesInBackward
from thunder_memsave.passes.overlap.room import Room
from thunder_memsave.passes.step import Step, Traces


class Schedule(Protocol):
    """Orders a forward or a backward."""

    def __call__(self, trace: TraceCtx, *, room: Room | None = None) -> TraceCtx:
        """Return the schedule; `room` limits the bytes in flight beside its window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that one compilation depends on but its traces."""

    steps: Sequence[Step[State]]
    """Those that are done, in order."""
    lowered: Lowered
    """The captured call, in ATen operators."""
    executors: Sequence[Executor]
    """Claim operations, in their order."""
    regathers: bool
    """Whether backward gathers whole weights again, or may as the plan says."""
    planner: MemoryPlanner | None
    """Decides what backward keeps; None: all that it reads."""
    arguments: Arguments
    """Facts about them for the planner."""
    schedule: Schedule
    unreduced: UnreducedGradients
    """Where whole gradients are kept between micro-batches."""
    is_run: bool
    """Whether the result is to be run here; if not, `run` refuses."""
    name: str
    """The call's name, for messages."""
    fusion: OpProfiles | None = None
    """Profiles by which elementwise operators are fused; None: they are not."""
    updates: UpdatesInBackward | None = None
    """Updates parameters in backward; None: nothing does."""
    graphs: CudaGraphs | None = None
    """The module's graphs; None: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class State(Traces):
    """A call between two steps of the list."""

    facts: Facts
    run: Callable[..., Any] | None = None
    """From the inputs of the lowered trace to what the captured call returns; the last step makes it."""
