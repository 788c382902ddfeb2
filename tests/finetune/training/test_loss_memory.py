"""The predicted peak of the loss between forward and backward equals the measured one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.allocator_events import live_after
from harness.memory import measured_memory
from thunder_memsave.finetune.objectives.causal_lm import loss_of_logits
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.finetune.training.loss_memory import caller_memory
from thunder_memsave.planner.graph import StepMemory

SHAPE = torch.Size((2, 24, 300))


def held(
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    mask: Any = "none",
    passes: int = 1,
    device: str = "cpu",
) -> StepMemory:
    rows, length, vocabulary = shape
    head = SimpleNamespace(weight=torch.empty(0, dtype=dtype))
    text = SimpleNamespace(vocab_size=vocabulary)
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: text), get_output_embeddings=lambda: head
    )
    sizes = BatchSizes(
        global_batch_size=rows * passes,
        micro_batch_size=rows,
        gradient_accumulation_steps=passes,
    )
    objective = SupervisedFineTuning(mask=mask, length=length)
    return caller_memory(objective, model, sizes, autocast=None, device_type=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_takes_what_was_said(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
    targets, scale = torch.randint(300, SHAPE[:2]), torch.ones(())

    def differentiate() -> object:
        return torch.autograd.grad(loss_of_logits(logits, targets) * scale, logits)

    differentiate()
    found = held(SHAPE, dtype).between_bytes
    assert found == measured_memory(differentiate).peak_bytes
    # The log-probabilities, and gradients before and after the softmax, in float32.
    assert found == pytest.approx(3 * 4 * SHAPE.numel(), rel=1e-3)


def test_on_cuda_tensors_take_whole_blocks() -> None:
    memory = held(torch.Size((1, 1, 129)), torch.float32, device="cuda")
    assert memory.between_bytes % 512 == 0
    assert memory.other_bytes == 3 * 512


@pytest.mark.parametrize(("mask", "num_given"), [("none", 1), ("boundaries", 2), ("additive", 2)])
def test_the_batches_of_a_step_are_held_but_for_what_the_call_is_given(
    mask: str, num_given: int
) -> None:
    memory = held(SHAPE, torch.float32, mask=mask, passes=3)
    one_tensor_bytes, ends_bytes = 8 * 2 * 24, 4 * 2
    assert memory.other_bytes == (3 * 3 - num_given) * one_tensor_bytes + 3 * ends_bytes


def test_the_allocations_of_the_loss_leave_its_gradient() -> None:
    memory = held(SHAPE, torch.float32, device="cuda")
    live = live_after(memory.loss_allocations)
    assert max(live) == memory.between_bytes
    assert live[-1] == -(-4 * SHAPE.numel() // 512) * 512
