"""Passes over the joint trace: forward, then backward, with operators claimed by executors and nothing fused yet.

A pass is a function `trace -> trace`. It returns the very same object when it has nothing to do, and otherwise a new
trace whose provenance names it. `tests/passes/contract.py` is what each of them must satisfy. `JOINT_PASSES` is the
one ordered list; Thunder's split into forward and backward, which comes after, derives what is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thunder_memsave import compat

compat.apply()

from thunder.core.trace import TraceCtx  # noqa: E402
from thunder.extend import FusionExecutor  # noqa: E402

from thunder_memsave.passes.gather_dtype import gather_in_compute_dtype  # noqa: E402
from thunder_memsave.passes.overwritten import keep_overwritten  # noqa: E402
from thunder_memsave.passes.regather import regather  # noqa: E402

__all__ = [
    "JOINT_PASSES",
    "JointPass",
    "JointTracePasses",
    "gather_in_compute_dtype",
    "keep_overwritten",
    "regather",
]

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
