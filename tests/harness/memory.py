"""Measures memory on the CPU to the byte, and records the traces that a compiled module goes through."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from thunder.core.trace import TraceCtx
from torch.profiler import ProfilerActivity, profile

from harness.joint_passes import JOINT_PASSES, joint_passes


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that the CPU's allocator counted while a function ran, beyond those live before."""

    peak_bytes: int
    end_bytes: int
    """Bytes live afterwards, the result included."""


def measured_memory(fn: Callable[[], object]) -> Measured:
    """Run `fn` and add up the profiler's memory events: all allocations through torch, kernels' scratch included.

    Run it once before: memory that libraries allocate once and keep would count.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        result = fn()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return Measured(peak, live)


def measured_peak_bytes(fn: Callable[[], object]) -> int:
    """Return the peak of `measured_memory`."""
    return measured_memory(fn).peak_bytes


@contextmanager
def joint_traces() -> Iterator[list[TraceCtx]]:
    """Collect the joint trace of every call that is compiled inside, after equal casts and views are merged."""
    seen: list[TraceCtx] = []

    def record(trace: TraceCtx) -> TraceCtx:
        seen.append(trace)
        return trace

    after = JOINT_PASSES.index("merge_equal") + 1
    with joint_passes(*JOINT_PASSES[:after], record, *JOINT_PASSES[after:]):
        yield seen
