"""Broadcast zero-dimensional tensors on CPU: right with the work-around, still wrong in plain Thunder."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum
from thunder_memsave.compat import cpu_scalar_gradients

_PLAIN_THUNDER = """
import warnings
warnings.simplefilter("ignore")
import torch
from thunder_memsave.compat import absent_transformer_engine, removed_names
with removed_names(), absent_transformer_engine.silence():
    import thunder
x = torch.randn(5, 4, requires_grad=True)
thunder.jit(lambda x: x + x.mean())(x).sum().backward()
torch.testing.assert_close(x.grad, torch.full((5, 4), 2.0))
"""


class AddsItsMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.where(y > 0, y, self.scale) + y.mean() * self.scale


def test_gradients_of_zero_dimensional_tensors_are_summed() -> None:
    Twins(AddsItsMean()).assert_equal(torch.randn(5, 4), loss=weighted_sum)


@pytest.mark.skipif(
    not cpu_scalar_gradients.is_needed(), reason="this Thunder is newer than the defect"
)
def test_canary_plain_thunder_still_has_the_defect() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PLAIN_THUNDER], capture_output=True, text=True, check=False
    )
    assert run.returncode != 0, "Thunder is healed: delete strategy/compat/cpu_scalar_gradients.py"
    assert "expand" in run.stderr or "AssertionError" in run.stderr, run.stderr
