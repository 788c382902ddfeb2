"""A vmap of the model is one operation of the captured graph, with the bits of eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        def inner(row: Tensor, number: Tensor) -> Tensor:
            return row * number.sin() + self.weight[0].sum()

        nested = torch.vmap(torch.vmap(inner, in_dims=(None, 0)), in_dims=(0, 0))
        mask, unread = (torch.vmap(lambda row: row > 0)(v) for v in (x, x + 1))
        assert unread.shape == mask.shape
        return nested(self.weight, x * 2) * mask[..., None]


def test_nested_maps_have_values_and_gradients_with_eagers_bits() -> None:
    twins = Twins(Mapped())
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum, rtol=0.0, atol=0.0)
    with torch.no_grad():
        twins.assert_equal(torch.randn(3, 4), rtol=0.0, atol=0.0)


class Gradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self) -> Tensor:
        return torch.func.grad(lambda w: w.sin().sum())(self.weight)


def test_other_transforms_are_refused_by_name_and_left_closed() -> None:
    with pytest.raises(CompileError, match=r"cannot be compiled: it returns no tensor"):
        CompiledModule(Gradients())()
    assert not torch._C._functorch.get_interpreter_stack()
    Twins(Mapped()).assert_equal(torch.randn(3, 4), loss=weighted_sum)
