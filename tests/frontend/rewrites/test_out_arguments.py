"""`out=` has the effect that it has in eager, on values of the graph and on buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError


class WritesOut(nn.Module):
    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("sums", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        torch.add(x, 1, out=y)
        torch.mul(self.sums, 0.5, out=self.sums)
        torch.add(self.sums, x, out=self.sums)
        return y * self.weight


def test_values_and_buffers_are_those_of_eager() -> None:
    twins = Twins(WritesOut())
    for _ in range(3):
        twins.assert_equal(torch.randn(3), loss=weighted_sum, rtol=0.0, atol=0.0)


def test_a_spectral_norm_trains_as_in_eager() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6))
    twins = Twins(layer.train())
    for _ in range(3):
        twins.assert_equal(torch.randn(4, 8), loss=weighted_sum)
    twins.change(lambda m: m.eval())
    twins.assert_equal(torch.randn(4, 8), loss=weighted_sum)


class OfAnotherDtype(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(3, dtype=torch.float64)
        torch.add(x, 1, out=y)
        return y * 2


def test_a_result_of_another_dtype_is_refused_with_file_and_line() -> None:
    with pytest.raises(CompileError, match=r"written to out= at .*test_out_arguments\.py:\d+"):
        CompiledModule(OfAnotherDtype())(torch.randn(3))
