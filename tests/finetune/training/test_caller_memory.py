"""The memory of the training loop itself is the one that was said."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.allocator_events import live_after
from harness.memory import measured_memory
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.finetune.training.caller_memory import caller_memory
from thunder_memsave.planner.graph import StepMemory

ROWS, LENGTH = 2, 24


def held(*, mask: Any = "none", passes: int = 1, device: str = "cpu") -> StepMemory:
    sizes = BatchSizes(
        global_batch_size=ROWS * passes,
        micro_batch_size=ROWS,
        gradient_accumulation_steps=passes,
    )
    objective = SupervisedFineTuning(mask=mask, length=LENGTH)
    return caller_memory(objective, sizes, device_type=device)


def test_the_scaled_loss_takes_what_was_said() -> None:
    loss, scale = torch.zeros((), requires_grad=True), torch.ones(())

    def differentiate() -> object:
        return torch.autograd.grad(loss * scale, loss)

    differentiate()
    assert held().between_bytes == measured_memory(differentiate).peak_bytes


def test_on_cuda_tensors_take_whole_blocks() -> None:
    memory = held(mask="boundaries", device="cuda")
    assert memory.between_bytes % 512 == 0
    # Where documents end, of which the call is given other numbers.
    assert memory.other_bytes == 512


@pytest.mark.parametrize(("mask", "num_given"), [("none", 2), ("boundaries", 3), ("additive", 3)])
def test_the_batches_of_a_step_are_held_but_for_what_the_call_is_given(
    mask: str, num_given: int
) -> None:
    memory = held(mask=mask, passes=3)
    one_tensor_bytes, ends_bytes, count_bytes = 8 * ROWS * LENGTH, 4 * ROWS, 8
    others_bytes = 3 * ends_bytes + 2 * count_bytes
    assert memory.other_bytes == (3 * 3 - num_given) * one_tensor_bytes + others_bytes


def test_the_allocations_of_the_loss_leave_its_gradient() -> None:
    memory = held(device="cuda")
    live = live_after(memory.loss_allocations)
    assert max(live) == memory.between_bytes
    assert live[-1] == 512
