"""Functions of the same name in two modules of torch have derivatives of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum
from thunder_memsave.compat import derivatives_by_name

_PLAIN_THUNDER = """
from thunder_memsave.compat import absent_transformer_engine, derivatives_by_name, removed_names
with removed_names(), absent_transformer_engine.silence():
    import thunder
print(sorted(s.id for s in derivatives_by_name.replaced_derivatives()))
"""


class Crossed(nn.Module):
    """`torch.cross` without `dim` takes the first one of size 3, `torch.linalg.cross` the last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.cross(y[:, :3], y[:, 1:]) + torch.norm(y, dim=1)[:, None]


@pytest.mark.filterwarnings("ignore:Using torch.cross without specifying the dim:UserWarning")
def test_gradients_are_those_of_the_function_that_was_called() -> None:
    Twins(Crossed()).assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert derivatives_by_name.replaced_derivatives() == []


@pytest.mark.skipif(
    not derivatives_by_name.is_needed(), reason="this Thunder is newer than the defect"
)
def test_canary_plain_thunder_still_has_the_defect() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _PLAIN_THUNDER]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "'torch.cross'" in run.stdout, "healed: delete strategy/compat/derivatives_by_name.py"
