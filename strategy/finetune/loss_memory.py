"""What a run's own code holds beside the compiled model: its loss, and batches that wait for their turn."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thunder_memsave.aten_record import AtenRecord, allocated_bytes
from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.data.packing import Batch
from thunder_memsave.finetune.loss import loss_of_logits
from thunder_memsave.finetune.model.build import precision_of
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.planner.graph import StepMemory


def caller_memory(
    config: RunConfig, model: Any, sizes: BatchSizes, *, device_type: str
) -> StepMemory:
    """What the training loop holds itself.

    Args:
        config: The run.
        model: A transformers causal language model.
        sizes: Of its batches.
        device_type: Of the device that holds them.
    """
    text = model.config.get_text_config()
    shape = torch.Size((sizes.micro_batch_size, config.data.max_seq_length, text.vocab_size))
    return StepMemory(
        between_bytes=loss_bytes(shape, _logits_dtype(config, model), device_type=device_type),
        other_bytes=_batch_bytes(config, sizes, device_type=device_type),
    )


def loss_bytes(shape: torch.Size, dtype: torch.dtype, *, device_type: str) -> int:
    """The most that the loss of a micro-batch takes beside its logits, the gradient of the logits included.

    It is computed and differentiated on tensors without data.

    Args:
        shape: Of the logits: rows, tokens, vocabulary.
        dtype: Of the logits.
        device_type: Of the device that holds them.
    """
    # On the CPU, where backward runs without a GPU too; the operators are the same.
    with FakeTensorMode():
        logits = torch.empty(shape, dtype=dtype, requires_grad=True)
        targets = torch.zeros(shape[:2], dtype=torch.int64)
        scale = torch.ones(())
        record = AtenRecord(
            (logits, targets, scale), allocated=lambda n, _: allocated_bytes(n, device_type)
        )
        with record:
            torch.autograd.grad(loss_of_logits(logits, targets) * scale, logits)
    return record.peak_bytes


def _batch_bytes(config: RunConfig, sizes: BatchSizes, *, device_type: str) -> int:
    """What the batches of a step take that no call of the model is given: targets, and those that wait."""
    tensor = sizes.micro_batch_size * config.data.max_seq_length * torch.int64.itemsize
    num_given = 2 if config.data.packing else 1  # input_ids, and position_ids
    num_tensors = len(fields(Batch)) * sizes.gradient_accumulation_steps - num_given
    return num_tensors * allocated_bytes(tensor, device_type)


def _logits_dtype(config: RunConfig, model: Any) -> torch.dtype:
    if precision_of(config) == "bf16-mixed":
        return torch.bfloat16
    dtype: torch.dtype = model.get_output_embeddings().weight.dtype
    return dtype
