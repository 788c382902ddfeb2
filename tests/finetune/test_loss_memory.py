"""What the loss takes between forward and backward, found without computing it, is what it takes."""

from __future__ import annotations

import pytest
import torch

from harness.memory import measured_memory
from thunder_memsave.finetune.loss import loss_of_logits
from thunder_memsave.finetune.loss_memory import loss_bytes

SHAPE = torch.Size((2, 24, 300))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_takes_what_was_said(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(SHAPE, dtype=dtype, requires_grad=True)
    targets, scale = torch.randint(300, SHAPE[:2]), torch.ones(())

    def differentiate() -> object:
        return torch.autograd.grad(loss_of_logits(logits, targets) * scale, logits)

    differentiate()
    found = loss_bytes(SHAPE, dtype, device_type="cpu")
    assert found == measured_memory(differentiate).peak_bytes
    # Logarithms, and gradients before and after the softmax, in float32.
    assert found == pytest.approx(3 * 4 * SHAPE.numel(), rel=1e-3)


def test_on_cuda_tensors_take_whole_blocks() -> None:
    shape = torch.Size((1, 1, 129))
    assert loss_bytes(shape, torch.float32, device_type="cuda") % 512 == 0
