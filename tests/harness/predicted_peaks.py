"""Peaks of a step: predicted without what is there before, and measured with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.memory import measured_memory
from harness.rank_memory import letting_go
from thunder_memsave.budget.extract import profiles
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.budget.running_program import program
from thunder_memsave.measure.scratch import MeasuredScratch
from thunder_memsave.planner.simulate import simulate


def predicted_bytes(module: Any, directory: Path) -> int:
    """Return the peak of the traces that run, without what is there before."""
    return predicted_of_capture(*module._forward_module.captures, directory=directory)


def predicted_of_capture(compiled: Any, *, directory: Path) -> int:
    """Return the same for the traces of one capture; scratch is measured, and kept in a directory."""
    known = profiles(scratch=MeasuredScratch(directory=directory))
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    found = program(*traces, known=known, differentiated={0})
    return simulate(found).peak_bytes - sum(found.storages[s].nbytes for s in found.held)


def planned_bytes(call: PlannedCall) -> int:
    """Return the peak that a call is planned to have, without what is there before."""
    held = sum(call.program.storages[s].nbytes for s in call.program.held) + call.memory.other_bytes
    return call.profile.peak_bytes - held


def peak_on_a_rank(module: Any, step: Callable[[], object]) -> int:
    """Return the peak of a step of one of several ranks, with the parameters, buffers and gradients that are there."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    held = sum(t.nbytes for t in (*module.parameters(), *module.buffers(), *gradients))
    with letting_go():
        return held + measured_memory(step).peak_bytes
