"""Forecasts how fast a planned run would be, before a device has confirmed it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thunder_memsave.planner.cost import forward_and_backward_us, roofline_us
from thunder_memsave.planner.offload.engines import CopyRates

if TYPE_CHECKING:
    from thunder_memsave.finetune.plan.plan_run import RunPlan


def micro_batch_us(made: RunPlan) -> float:
    """Return the microseconds of forward and backward, without the optimizer's update.

    Kernels run at the rates that they usually sustain, one after the other. What waits for copies of activations
    counts, and so does the part of one micro-batch in the copies of an optimizer's states that are on the host.
    """
    return forward_and_backward_us(made.call.program, made.device) + waits_us(made)


def again_us(made: RunPlan) -> float:
    """Return what of that is recomputation."""
    steps = made.call.program.steps
    return sum(roofline_us(step.op, made.device) for step in steps if step.is_repeated)


def waits_us(made: RunPlan) -> float:
    """Return what of that is waiting for copies."""
    exposed_us = 0.0 if made.call.time is None else made.call.time.exposed_us
    return exposed_us + states_us(made)


def states_us(made: RunPlan) -> float:
    """Return the microseconds per micro-batch of copying an optimizer's states in and out once after backward."""
    memory = made.call.memory
    if not memory.host_bytes or memory.updates:  # those in backward are on the timeline of the step
        return 0.0
    return CopyRates.of(made.device).states_us(memory.host_bytes) / made.num_micro_batches


def tokens_of(made: RunPlan) -> int:
    """Return the tokens of all ranks in a micro-batch, padding included."""
    return made.num_rows * made.num_tokens * made.num_ranks


def tokens_per_s(made: RunPlan) -> float:
    """Return the tokens of all ranks per second, padding included."""
    return tokens_of(made) / micro_batch_us(made) * 1e6
