"""Kernels of ours, and functions that look at numbers, are calls that stay whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum
from thunder_memsave.errors import CompileError
from thunder_memsave.ops.families.packed_attention import boundaries_of, packed_mask


def names_of(twins: Twins) -> list[str]:
    return [b.sym.name for b in twins.compiled.captures[-1].forward_traces[-1].bound_symbols]


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x: Tensor, boundaries: Tensor) -> Tensor:
        heads = self.norm(x)
        mask = packed_mask(boundaries, x.shape[0], x.shape[2])
        return F.scaled_dot_product_attention(heads, heads, heads, mask)


def test_packed_rows_attend_by_their_boundaries_and_norms_are_one_operator() -> None:
    twins = Twins(Packed())
    x = torch.randn(2, 3, 12, 8)
    ends = torch.tensor([[3, 7, 12], [12, 12, 12]], dtype=torch.int32)
    twins.assert_equal(x, boundaries_of(ends, 12), loss=weighted_sum)
    names = names_of(twins)
    assert "cpu_packed_attention" in names
    assert "rms_norm_kernel" in names


class FromSpectrum(nn.Module):
    """`torch.istft` looks whether the window has zeros, on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))
        self.register_buffer("window", torch.hann_window(8))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.window, Tensor)
        spectrum = torch.stft(x, 8, 4, window=self.window, return_complex=True)
        signal = torch.istft(spectrum * 2, 8, 4, window=self.window, length=x.shape[-1])
        return signal * self.weight


def test_a_function_that_looks_at_numbers_runs_where_no_gradient_is_needed() -> None:
    twins = Twins(FromSpectrum())
    twins.assert_equal(torch.randn(2, 32), loss=weighted_sum, rtol=0.0, atol=0.0)


class Refused(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embedding = kind, nn.Embedding(9, 4, max_norm=0.5)
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True, affine=True)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "renormalised":
            return self.embedding(torch.arange(3)) + x
        if self.kind == "statistics":
            return self.norm(x.T[None])
        y = self.linear(x).exp()
        z = y * 2
        y.add_(1.0)
        return z + y


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("renormalised", r"max_norm, which changes its weight"),
        ("statistics", r"instance_norm updates running statistics"),
        (
            "written over",
            r"changed in place at .*test_whole_calls\.py:\d+.*eager PyTorch ends there",
        ),
    ],
)
def test_changes_that_would_be_lost_or_that_eager_refuses_too_are_refused_by_name(
    kind: str, message: str
) -> None:
    with pytest.raises(CompileError, match=message):
        Twins(Refused(kind)).compiled(torch.randn(3, 4))
