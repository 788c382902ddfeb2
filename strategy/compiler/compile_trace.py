"""Goes through the list of steps with a lowered trace, and records what each did."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from thunder.core.trace import TraceCtx

from thunder_memsave.compiler.state import Facts, State
from thunder_memsave.compiler.step_records import StepRecord
from thunder_memsave.compiler.trace_files import TraceFiles
from thunder_memsave.passes.step import done


@dataclass(frozen=True, slots=True)
class CompiledTrace:
    """A trace made to run."""

    state: State
    """After the last step."""
    records: Sequence[StepRecord]
    forward_traces: Sequence[TraceCtx]
    """The joint trace, then the forward, after each step that changed it."""


def compile_trace(facts: Facts, *, files: TraceFiles | None, lower_s: float = 0.0) -> CompiledTrace:
    """Do all steps.

    Args:
        facts: The steps, and what they depend on.
        files: Gets the traces after each step.
        lower_s: Seconds that it took to make the first trace.

    Raises:
        CompileError: it cannot be compiled to what eager PyTorch computes.
        BudgetError: no plan fits the memory budget.
    """
    state = State(joint=facts.lowered.trace, facts=facts)
    records = [StepRecord.of("capture", lower_s, state)]
    traces = [state.joint]
    if files is not None:
        files.write(records[0].name, state, before=None)
    for step in facts.steps:
        before, start = state, time.perf_counter()
        state = done(step, state)
        records.append(StepRecord.of(step.name, time.perf_counter() - start, state))
        if files is not None:
            files.write(step.name, state, before=before)
        if state.current[0] is not traces[-1]:
            traces.append(state.current[0])
    return CompiledTrace(state, records, traces)
