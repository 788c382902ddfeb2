"""Changes in place through views of one tensor reach all of them, as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError


def _parts(y: Tensor) -> Tensor:
    both = y.new_empty(3, 6)
    both[:, :4].copy_(y)
    both[:, 4:].copy_(y[:, :2] * 2)
    return both


def _of_a_value(y: Tensor) -> Tensor:
    doubled = y * 2
    doubled[:, :2].mul_(3.0)
    before = doubled.t()
    doubled[1:].add_(y[1:])
    return doubled * before.t()


def _in_two(y: Tensor) -> Tensor:
    a, b = torch.zeros(3, 4), torch.ones(3, 4)
    a[0].add_(y[0])
    b[:, 1].copy_(a[:, 1])
    a[1:] = b[1:] * y[1:]
    return a + b


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize("function", [_parts, _of_a_value, _in_two])
def test_all_views_have_the_values_and_gradients_of_eager(
    function: Callable[[Tensor], Tensor],
) -> None:
    twins = Twins(Applies(function))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum, rtol=0.0, atol=0.0)
    with torch.no_grad():
        twins.assert_equal(torch.randn(3, 4), rtol=0.0, atol=0.0)


class BetweenLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2.0
        rows = y[:2]
        y.mul_(3.0)
        z = self.linear(y)
        rows.add_(1.0)
        return y + z


def test_a_change_across_a_linear_layer_is_refused_with_file_and_line() -> None:
    with pytest.raises(
        CompileError, match=r"changed in place at .*test_view_writes\.py:\d+ in forward"
    ):
        CompiledModule(BetweenLayers())(torch.randn(3, 4))
