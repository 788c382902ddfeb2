"""Measures the memory of a run's own code outside of the compiled model: its loss, and queued batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from thunder_memsave.aten.record import AtenRecord, allocated_bytes
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.planner.graph import Allocations, StepMemory


def caller_memory(
    objective: Objective[Any],
    model: Any,
    sizes: BatchSizes,
    *,
    autocast: torch.dtype | None,
    device_type: str,
) -> StepMemory:
    """Measure the memory of the training loop itself, on tensors without data.

    Args:
        objective: The objective of the run.
        model: The trained model; it is not called.
        sizes: Its batch sizes; all micro-batches of a step are on the device.
        autocast: Dtype of autocast, if it is on.
        device_type: Type of the device, whose allocator rounds sizes.
    """
    num_rows = sizes.micro_batch_size
    # On the CPU, where backward also runs without a GPU; the operators are the same.
    record = AtenRecord(allocated=lambda nbytes, _: allocated_bytes(nbytes, device_type))
    with FakeTensorMode(), record:
        batch = objective.blank(num_rows)
        batch_bytes = record.live_bytes
        output = objective.blank_output(model, num_rows, autocast=autocast)
        between_bytes, allocations = _loss_bytes(objective, output, batch, record)
        del output
        inputs = objective.model_inputs(batch)
        others_bytes = record.live_bytes - batch_bytes
        del batch
        # The plan of the model's call counts its arguments itself.
        given_bytes = record.live_bytes - others_bytes
        del inputs
    return StepMemory(
        between_bytes=between_bytes,
        other_bytes=sizes.gradient_accumulation_steps * batch_bytes - given_bytes,
        loss_allocations=allocations,
    )


def _loss_bytes(
    objective: Objective[Any], output: Any, batch: Any, record: AtenRecord
) -> tuple[int, Allocations]:
    """Return the peak bytes of the loss besides batch and output, including the output's gradient, and its allocations.

    They end while the output's gradient is live.
    """
    leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    differentiated = [each for each in leaves if each.requires_grad]
    scale = torch.ones(())
    before = record.peak_bytes = record.live_bytes
    start = len(record.allocations)
    gradients = torch.autograd.grad(objective.loss(output, batch) * scale, differentiated)
    allocations = record.allocations_from(start)
    del gradients
    return record.peak_bytes - before, allocations
