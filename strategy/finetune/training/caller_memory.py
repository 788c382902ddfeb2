"""Measures the memory of the training loop itself, outside of the compiled call: queued batches, and a loss's scale."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_memsave.aten.record import AtenRecord, allocated_bytes
from thunder_memsave.finetune.objectives.loss_in_model import call_inputs
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.planner.graph import StepMemory


def caller_memory(objective: Objective[Any], sizes: BatchSizes, *, device_type: str) -> StepMemory:
    """Measure it on tensors without data.

    Args:
        objective: The objective of the run.
        sizes: Its batch sizes; all micro-batches of a step are on the device.
        device_type: Type of the device, whose allocator rounds sizes.
    """
    # On the CPU, where backward also runs without a GPU; the operators are the same.
    record = AtenRecord(allocated=lambda nbytes, _: allocated_bytes(nbytes, device_type))
    with FakeTensorMode(), record:
        batch = objective.blank(sizes.micro_batch_size)
        batch_bytes = record.live_bytes
        inputs = call_inputs(objective, batch)
        others_bytes = record.live_bytes - batch_bytes
        del batch
        # The plan of the call counts its arguments itself.
        given_bytes = record.live_bytes - others_bytes
        del inputs
        loss, scale = torch.zeros((), requires_grad=True), torch.ones(())
        before = record.peak_bytes = record.live_bytes
        start = len(record.allocations)
        gradient = torch.autograd.grad(loss * scale, loss)
        allocations = record.allocations_from(start)
        del gradient
    return StepMemory(
        between_bytes=record.peak_bytes - before,
        other_bytes=sizes.gradient_accumulation_steps * batch_bytes - given_bytes,
        loss_allocations=allocations,
    )
