"""Kernels written out in PyTorch's operators have the kernels' bits, and fuse where a step takes no more memory."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness.fused_steps import step
from thunder_memsave.compiler import fuse
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.runs import follow
from thunder_memsave.ops.families import rms_norm

VALUES = {
    "rows": torch.randn(3, 5, 96),
    "of one row": torch.randn(1, 7),
    "large": torch.randn(9, 64) * 1e4,
    "small": torch.randn(9, 64) * 1e-5,
    "with infinity": torch.randn(4, 33).index_fill(0, torch.tensor([2]), float("inf")),
    "zero": torch.zeros(2, 16),
}


def compared(given: Tensor, num_dims: int, weight: Tensor | None, eps: float | None) -> None:
    result, rstd = rms_norm.rms_norm(given, num_dims, weight, eps)
    ours = rms_norm._written_out(given, num_dims, weight, eps)
    assert_same(ours[0], result)
    assert_same(ours[1], rstd)
    grad = torch.randn_like(result)
    operands = (grad, given, num_dims, rstd, weight, eps)
    assert_same(rms_norm._of_value_written_out(*operands), rms_norm._of_value(*operands))
    if weight is not None:
        operands = (grad, given, num_dims, rstd, weight, eps)
        ours_of_weight = rms_norm._of_weight_written_out(*operands)
        assert_same(ours_of_weight, rms_norm._of_weight(*operands))


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("eps", [1e-6, 1e-5, None, 0.1])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_a_norm_written_out_has_the_bits_of_pytorchs(
    name: str, has_weight: bool, eps: float | None
) -> None:
    given = VALUES[name]
    compared(given, 1, torch.randn(given.shape[-1]) if has_weight else None, eps)


def test_a_norm_over_several_dims_has_the_bits_of_pytorchs() -> None:
    compared(torch.randn(6, 5, 96), 2, torch.randn(5, 96), 1e-6)
    compared(torch.randn(5, 96), 2, torch.randn(5, 96), 1e-6)


class Normed(nn.Module):
    """A norm between sums and products, which fuse with its own."""

    def __init__(self, size: int = 96) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.inner = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.inner(self.norm(x))
        return x.pow(2).mean()


def given(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 32, 96, dtype=dtype, requires_grad=True)}


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
def test_a_norm_fuses_with_its_neighbours_and_takes_the_bytes_predicted(policy: str) -> None:
    inputs = given()
    unfused, fused = (
        step(Normed, inputs, fusion=fusion, policy=policy) for fusion in (False, True)
    )
    assert unfused.order_of("rms_norm") != []
    assert fused.order_of("rms_norm") == []
    assert fused.num_regions > 3
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert fused.measured_bytes == fused.predicted_bytes <= unfused.predicted_bytes


def test_a_norm_over_all_dims_fuses() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm((4, 96))
            self.linear = nn.Linear(96, 96)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.norm(x * 2) + x).pow(2).mean()

    inputs = {"x": torch.randn(4, 96, requires_grad=True)}
    unfused, fused = (step(Whole, inputs, fusion=fusion) for fusion in (False, True))
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert fused.order_of("rms_norm") == []


def test_a_norm_stays_whole_where_it_would_take_more_memory() -> None:
    def most_held(trace: Any, values: Any) -> int:
        follow(trace, values)
        return len(trace.bound_symbols)  # the one with more symbols takes more

    with (
        patch.object(fuse, "most_held", most_held),
        patch.object(fuse, "fused", lambda t, v, **_: t),
    ):
        ran = step(Normed, given(), fusion=True)
    assert ran.order_of("rms_norm") != []


def test_a_norm_of_what_is_not_contiguous_stays_whole() -> None:
    """PyTorch copies it first, and its result is contiguous."""
    inputs = {"x": torch.randn(32, 4, 96).transpose(0, 1).requires_grad_()}
    unfused, ran = (step(Normed, inputs, fusion=fusion) for fusion in (False, True))
    assert ran.order_of("rms_norm") != []
    assert all(map(torch.equal, ran.bits, unfused.bits))


def test_a_norm_of_16_bits_stays_whole() -> None:
    """PyTorch computes it in float32 and rounds once."""
    ran = step(lambda: Normed().bfloat16(), given(torch.bfloat16), fusion=True)
    assert ran.order_of("rms_norm") != []
