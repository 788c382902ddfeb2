"""The joint passes in the order in which they run, and the executor by which Thunder runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor

from thunder_memsave.passes.gather_dtype import gather_in_compute_dtype
from thunder_memsave.passes.overwritten import keep_overwritten
from thunder_memsave.passes.regather import regather

JointPass = Callable[[TraceCtx], TraceCtx]

JOINT_PASSES: tuple[JointPass, ...] = (
    keep_overwritten,
    gather_in_compute_dtype,
    regather,
)
"""In the order in which they run."""


class JointTracePasses(FusionExecutor):  # type: ignore[misc]
    """Thunder's supported hook for such passes: an executor that claims nothing and is handed the whole trace.

    It must be the first in the list of executors, before those that fuse.
    """

    def __init__(self, passes: Sequence[JointPass]) -> None:
        """`passes` run in order; `traces` keeps the result of each that did something."""
        super().__init__("thunder_memsave_joint_passes", version="0")
        self._passes = tuple(passes)
        self.traces: list[TraceCtx] = []

    def can_fuse(self, bsym: Any) -> bool:
        """Nothing is fused here."""
        return False

    def get_fuel(self, amount: int = 1, /) -> bool:
        """Thunder asks before every fusion; there is nothing to ration."""
        return True

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """Run the passes on the joint trace (or on an inference trace, which has no backward)."""
        for run in self._passes:
            changed = run(trace)
            if changed is not trace:
                self.traces.append(changed)
            trace = changed
        return trace
