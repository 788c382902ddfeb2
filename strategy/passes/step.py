"""A step of the one list of what happens to a trace, and the traces that it has and makes.

`compiler/pipeline.py` is the list; planning is one of its steps, and does those that come after it with every plan that
it tries.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from thunder.core.trace import TraceCtx

from thunder_memsave.ops.updated_parameters import Update
from thunder_memsave.passes.overlap.room import Room
from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.settings.step_names import WHY_NEEDED

Pass = Callable[[TraceCtx], TraceCtx]


def _nothing() -> TraceCtx | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyTerms:
    """What decides when copies to the host and back run beside what computes."""

    program_of: Callable[[TraceCtx, TraceCtx], Program]
    """Makes the program of a forward and a backward after values are deleted after their last use."""
    costs_us: Callable[[Program], Sequence[float]]
    """Returns the time of each of its steps."""
    rates: CopyRates
    memory: StepMemory
    target_bytes: int | None
    """The peak that copies may fill; None: no limit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Traces:
    """Traces of a call after a step."""

    joint: TraceCtx
    """Forward, then backward; or what is computed without gradients."""
    forward: TraceCtx | None = None
    """None before the split."""
    backward: TraceCtx | None = None
    """None also where nothing needs a gradient."""
    keeping: TraceCtx | None = None
    """The backward that keeps gradients instead of reducing them; None where no backward may."""
    tiled: Callable[[], TraceCtx | None] = _nothing
    """Makes `joint` with its wide values in tiles, for a plan that would not fit otherwise; None: it has none."""
    actions: Actions | None = None
    """The plan's, for the values of `joint`; None: backward reads what it reads."""
    joins: Mapping[str, str] = field(default_factory=dict)
    """Values that kernels of backward recompute beside their own results, each with one of these."""
    room: Room | None = None
    """Room of the plan for collectives in flight; None: only their window limits them."""
    added: frozenset[str] = frozenset()
    """Names of the parameters to whose gradients backward adds new ones itself."""
    updated: Mapping[str, Update] = field(default_factory=dict)
    """The updates that backward makes itself, by the parameter's name."""
    copies: CopyTerms | None = None
    """On which copies to the host are placed; None: the plan has none."""
    tried: dict[str, tuple[Traces, Traces]] = field(default_factory=dict)
    """Input and result of each step for the plan that was tried last. Only this attribute changes."""

    @property
    def current(self) -> tuple[TraceCtx, ...]:
        """Return the traces that the next step reads."""
        if self.forward is None:
            return (self.joint,)
        found = (self.forward, self.backward, self.keeping)
        return tuple(trace for trace in found if trace is not None)


S = TypeVar("S", bound=Traces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Generic[S]):
    """One step, by name."""

    name: str
    does: str
    """One line, for those who read the list."""
    do: Callable[[S], S]
    """Gives back the very same traces where there is nothing to do."""
    is_tried: bool = False
    """Whether the plan does it with every plan that it tries, to see what would run."""
    reads_actions_alone: bool = False
    """Whether it reads nothing of a plan but its actions: with the same in another room it makes the same."""

    @property
    def optional(self) -> bool:
        """Whether results are correct without it."""
        return not WHY_NEEDED[self.name]


def on_joint(change: Pass) -> Callable[[S], S]:
    """Make a step's `do` of a pass over the joint trace."""

    def do(traces: S) -> S:
        return replace(traces, joint=change(traces.joint))

    return do


def try_steps(steps: Sequence[Step[S]], traces: S) -> S:
    """Do steps one after the other, but for those that the last try did with the same actions.

    What each made is remembered, for `done` and for the next try.
    """
    last = dict(traces.tried)
    traces.tried.clear()
    for step in steps:
        before, after = last.get(step.name, (None, None))
        is_made = before is not None and step.reads_actions_alone and _acts_as(traces, before)
        made = _in_plan_of(traces, after) if is_made else step.do(traces)
        traces.tried[step.name] = (traces, made)
        traces = made
    return traces


def done(step: Step[S], traces: S) -> S:
    """Do a step, unless the plan that was tried last did it with the same."""
    before, after = traces.tried.get(step.name, (None, None))
    if before is not None and _is_as(traces, before):
        return after  # type: ignore[return-value]  # what a step makes is of the type of what it gets
    return step.do(traces)


def _in_plan_of(traces: S, made: Any) -> S:
    """Return what a step made, which is of the type of what it got, as of the plan of `traces`."""
    found: S = replace(made, room=traces.room, copies=traces.copies)
    return found


def _is_as(traces: Traces, other: Traces) -> bool:
    return (traces.room, traces.copies) == (other.room, other.copies) and _acts_as(traces, other)


def _acts_as(traces: Traces, other: Traces) -> bool:
    """Tell whether both have the same traces and actions."""
    is_same_plan = _plan_of(traces) == _plan_of(other)
    mine, others = traces.current, other.current
    return is_same_plan and len(mine) == len(others) and all(map(operator.is_, mine, others))


def _plan_of(traces: Traces) -> tuple[object, ...]:
    return traces.actions, traces.joins, traces.added, traces.updated
