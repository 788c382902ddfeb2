"""Lowering checks itself against PyTorch, and does not differentiate values that need no gradient."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_memsave.frontend.calls as calls
from harness.parity import Twins, weighted_sum


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


def _half_tanh(x: Any) -> Any:
    import thunder.torch as ltorch

    return ltorch.tanh(x).to(torch.float16)


class Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def test_a_value_that_thunder_would_compute_differently_is_torchs_own() -> None:
    twins, x = Twins(Tanh()), torch.randn(3, requires_grad=True)
    with patch.object(calls, "_torch_to_thunder_function_map", {torch.tanh: _half_tanh}):
        twins.assert_equal(x, loss=weighted_sum, rtol=0.0, atol=0.0)
        twins.assert_equal(x.detach(), rtol=0.0, atol=0.0)


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
