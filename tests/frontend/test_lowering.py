"""Lowering checks itself against PyTorch, and does not differentiate values that need no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_memsave.frontend.calls as calls
from harness.parity import Twins, weighted_sum
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        buckets = torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]))
        return self.linear(x) * F.one_hot(buckets, 4).sum(-1)


def test_operations_unknown_to_thunder_run_as_they_are_where_no_gradient_is_needed() -> None:
    twins = Twins(Masked())
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


class NoRule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.renorm(self.linear(x), 2, 0, 1.0)


def test_an_unknown_operation_that_needs_a_gradient_is_refused_with_file_and_line() -> None:
    with pytest.raises(CompileError, match=r"renorm \(at .*test_lowering\.py:\d+ in forward\)"):
        CompiledModule(NoRule())(torch.randn(3, 4))


def _half_tanh(x: Any) -> Any:
    import thunder.torch as ltorch

    return ltorch.tanh(x).to(torch.float16)


def test_a_value_that_thunder_would_compute_differently_is_refused() -> None:
    wrong = {torch.tanh: _half_tanh}

    class Tanh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    with (
        patch.object(calls, "_torch_to_thunder_function_map", wrong),
        pytest.raises(CompileError, match=r"torch\.float16, PyTorch as .*torch\.float32"),
    ):
        CompiledModule(Tanh())(torch.randn(3))


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.table = torch.arange(3.0)  # a plain attribute, neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * self.table + torch.tensor([1.0, 2.0, 3.0])


def test_tensor_literals_and_plain_tensor_attributes() -> None:
    twins = Twins(Constants())
    twins.assert_equal(torch.randn(3), loss=weighted_sum)
    twins.change(lambda m: setattr(m, "table", torch.full((3,), 5.0)))
    twins.assert_equal(torch.randn(3), loss=weighted_sum)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angle = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * torch.ones(4)
            cosine = angle.cos()
        return self.linear(x) * cosine


def test_no_grad_regions_get_no_backward() -> None:
    twins = Twins(Rotary())
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    backward = twins.compiled.captures[0].backward_traces[-1]
    assert not any(b.sym.name in ("sin", "cos") for b in backward.bound_symbols)


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda y: torch.hstack([y, y * 2]), "tensors in a list"),
        (lambda y: F.cosine_similarity(x1=y, x2=y * 2), "tensors in a list or as keywords"),
        (lambda y: torch.zeros(4).index_put((torch.tensor([1]),), y[0, :1]), "the values that"),
        (lambda y: torch.view_as_real(torch.view_as_complex(y.view(3, 2, 2))), "complex numbers"),
    ],
)
def test_operations_whose_gradient_thunder_gets_wrong_are_refused_with_file_and_line(
    function: Callable[[Tensor], Tensor], what: str
) -> None:
    with pytest.raises(
        CompileError, match=rf"wrong gradients of .*test_lowering\.py:\d+ .*respect to {what}"
    ):
        CompiledModule(Applies(function))(torch.randn(3, 4))


def test_an_operation_without_a_gradient_rule_is_refused_with_file_and_line() -> None:
    with pytest.raises(
        CompileError, match=r"cannot differentiate flip \(at .*test_lowering\.py:\d+ in "
    ):
        CompiledModule(Applies(lambda y: y.flip(1)))(torch.randn(3, 4))


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.linear(x), (0, 1), value=1.0)


def test_an_attribute_that_deterministic_code_reads_is_a_constant() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        Twins(Padded()).assert_equal(torch.randn(3, 4), loss=weighted_sum)
    finally:
        torch.use_deterministic_algorithms(mode=False)
