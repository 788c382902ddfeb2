"""A plan that is tried again in another room does only those steps again that the room, or a step before, changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from thunder.core.trace import TraceCtx

from thunder_memsave.passes.overlap.room import NO_ROOM
from thunder_memsave.passes.step import Step, Traces, try_steps
from thunder_memsave.planner.actions import RECOMPUTE, Actions


class Steps:
    """Steps that make new traces, and count how often."""

    def __init__(self) -> None:
        self.done: Counter[str] = Counter()
        self.list = [
            Step(name=name, does="", do=self._do(name), is_tried=True, reads_actions_alone=alone)
            for name, alone in (
                ("split", True),
                ("check", True),
                ("schedule", False),
                ("delete", True),
            )
        ]

    def _do(self, name: str) -> Callable[[Traces], Traces]:
        def do(traces: Traces) -> Traces:
            self.done[name] += 1
            if name == "check":
                return traces
            return replace(traces, forward=TraceCtx(None), backward=TraceCtx(None))

        return do


def test_another_room_changes_what_comes_after_the_schedule() -> None:
    steps, first = Steps(), Traces(joint=TraceCtx(None))
    try_steps(steps.list, first)
    found = try_steps(steps.list, replace(first, room=NO_ROOM))
    assert steps.done == {"split": 1, "check": 1, "schedule": 2, "delete": 2}
    assert found.room is NO_ROOM


def test_other_actions_and_other_traces_change_all() -> None:
    steps, first = Steps(), Traces(joint=TraceCtx(None))
    try_steps(steps.list, first)
    other = replace(first, actions=Actions({"t0": RECOMPUTE}))
    try_steps(steps.list, other)
    assert set(steps.done.values()) == {2}
    try_steps(steps.list, replace(other, joint=TraceCtx(None)))
    assert set(steps.done.values()) == {3}
