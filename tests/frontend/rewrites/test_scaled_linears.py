"""A power of two moves from the large result of a linear to its small input, with the same bits; nothing else does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fp8_linears import fp8_module
from thunder_memsave.compiler.compiled_module import CompiledModule

WIDTH, RANK = 32, 16


class Adapted(nn.Module):
    def __init__(self, factor: Any, *, out: int = WIDTH, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(WIDTH, out)
        self.base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, out, bias=bias)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.factor


class UsedTwice(Adapted):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(self.down(x))
        return self.base(x) + self.factor * up + F.gelu(up)


def scaled_widths(model: nn.Module, dtype: torch.dtype, *, autocast: bool = False) -> list[int]:
    """Compare all bits with eager's; return the widths of forward's products with a number."""
    model = model.to(dtype)
    compiled = CompiledModule(model)
    # Under autocast each reader of x casts it, and gradients of two casts are added up in another order.
    x = torch.randn(8, WIDTH, dtype=dtype, requires_grad=not autocast)
    trained = [t for t in (x, *model.parameters()) if t.requires_grad]
    both = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for call in (model, compiled):
            output = call(x)
            grads = torch.autograd.grad(output.float().square().sum(), trained)
            both.append([output, *grads])
    assert all(map(torch.equal, *both))
    return widths_of_products(compiled)


def widths_of_products(compiled: CompiledModule) -> list[int]:
    symbols = compiled.captures[-1].forward_traces[-1].bound_symbols
    products = "aten_mul_Tensor", "mul_tensor_in_place"
    return [b.output.shape[-1] for b in symbols if b.sym.name in products]


@pytest.mark.parametrize("factor", [2.0, 0.25, -4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_power_of_two_is_moved_with_the_same_bits(factor: float, dtype: torch.dtype) -> None:
    assert scaled_widths(Adapted(factor), dtype) == [RANK]


def test_under_autocast_it_is_moved_too() -> None:
    assert scaled_widths(Adapted(2.0), torch.float32, autocast=True) == [RANK]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        (Adapted(3.0), torch.float32),
        (Adapted(2.0, bias=True), torch.float32),
        (Adapted(2.0), torch.float16),
        (Adapted(nn.Parameter(torch.tensor(2.0))), torch.float32),
        (UsedTwice(2.0), torch.float32),
    ],
    ids=["no power of two", "bias", "float16", "tensor", "used twice"],
)
def test_all_others_stay(model: Adapted, dtype: torch.dtype) -> None:
    assert set(scaled_widths(model, dtype)) == {WIDTH}


def test_a_result_that_is_not_larger_keeps_its_factor() -> None:
    assert scaled_widths(Adapted(2.0, out=RANK), torch.float32) == [RANK]


def test_the_input_of_a_linear_in_fp8_stays_because_its_scale_depends_on_it() -> None:
    compiled = fp8_module(Adapted(2.0))
    compiled(torch.randn(16, WIDTH))
    assert WIDTH in widths_of_products(compiled)
    assert RANK not in widths_of_products(compiled)
