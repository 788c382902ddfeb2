"""What a run's own code holds beside the compiled model: its loss, and batches that wait for their turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from thunder_memsave.aten_record import AtenRecord, allocated_bytes
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.planner.graph import StepMemory


def caller_memory(
    objective: Objective[Any],
    model: Any,
    sizes: BatchSizes,
    *,
    autocast: torch.dtype | None,
    device_type: str,
) -> StepMemory:
    """What the training loop holds itself: found on tensors without data.

    Args:
        objective: Of the run.
        model: Which is trained; it is not called.
        sizes: Of its batches; those of a step all lie on the device.
        autocast: The format that autocast computes in, if it is on.
        device_type: Of the device that holds them.
    """
    num_rows = sizes.micro_batch_size
    # On the CPU, where backward runs without a GPU too; the operators are the same.
    record = AtenRecord(allocated=lambda nbytes, _: allocated_bytes(nbytes, device_type))
    with FakeTensorMode(), record:
        batch = objective.blank(num_rows)
        batch_bytes = record.live_bytes
        output = objective.blank_output(model, num_rows, autocast=autocast)
        between_bytes = _loss_bytes(objective, output, batch, record)
        del output
        inputs = objective.model_inputs(batch)
        others_bytes = record.live_bytes - batch_bytes
        del batch
        # The model's call counts what it is given itself.
        given_bytes = record.live_bytes - others_bytes
        del inputs
    return StepMemory(
        between_bytes=between_bytes,
        other_bytes=sizes.gradient_accumulation_steps * batch_bytes - given_bytes,
    )


def _loss_bytes(objective: Objective[Any], output: Any, batch: Any, record: AtenRecord) -> int:
    """The most that the loss takes beside batch and output, the gradient of the output included."""
    leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    differentiated = [each for each in leaves if each.requires_grad]
    scale = torch.ones(())
    before = record.peak_bytes = record.live_bytes
    torch.autograd.grad(objective.loss(output, batch) * scale, differentiated)
    return record.peak_bytes - before
