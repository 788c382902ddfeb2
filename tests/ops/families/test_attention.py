"""CPU attention: one operator forward, one backward, the same numbers as eager, as PyTorch chooses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum


class Attention(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.settings = settings

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q * self.scale, k, v, mask, **self.settings)  # type: ignore[arg-type]


def _heads(*shape: int) -> list[Tensor]:
    return [torch.randn(*shape) for _ in range(3)]


def _symbols(twins: Twins) -> list[str]:
    compiled = twins.compiled.captures[0]
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    return [b.sym.name for trace in traces for b in trace.bound_symbols]


def test_flash_attention_is_one_operator_each_way_and_saves_no_scores() -> None:
    twins = Twins(Attention(is_causal=True))
    twins.assert_equal(*_heads(2, 3, 16, 8), loss=weighted_sum)
    symbols = _symbols(twins)
    assert symbols.count("aten_scaled_dot_product_flash_attention_for_cpu") == 1
    assert symbols.count("aten_scaled_dot_product_flash_attention_for_cpu_backward") == 1
    saved = twins.compiled.captures[0].forward_traces[-1].output[1][0]
    assert all(tuple(t.shape)[-2:] != (16, 16) for t in saved)


@pytest.mark.parametrize("mask_shape", [(6, 6), (2, 1, 6, 6), (2, 3, 6, 6)])
def test_additive_and_boolean_masks_match_eager(mask_shape: tuple[int, ...]) -> None:
    twins, heads = Twins(Attention()), _heads(2, 3, 6, 8)
    mask = torch.rand(mask_shape) > 0.3
    mask[..., 0] = True
    twins.assert_equal(*heads, mask, loss=weighted_sum)
    twins.assert_equal(*heads, torch.randn(mask_shape), loss=weighted_sum)
    assert "aten_scaled_dot_product_flash_attention_for_cpu" in _symbols(twins)


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 6, 8), (2, 6, 8), (2, 6, 8)),
        ((2, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 4)),
        ((1, 3, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    ],
    ids=["no head dimension", "other value size", "broadcast batch"],
)
def test_shapes_that_flash_does_not_take_are_decomposed_and_match_eager(
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    twins = Twins(Attention(is_causal=True))
    twins.assert_equal(*(torch.randn(s) for s in shapes), loss=weighted_sum)
    is_taken = len(shapes[0]) == 3 and Version(torch.__version__).release >= (2, 14)
    assert ("aten_scaled_dot_product_flash_attention_for_cpu" in _symbols(twins)) is is_taken


def test_float64_matches_eager() -> None:
    twins = Twins(Attention(is_causal=True, scale=0.2).double())
    twins.assert_equal(*(t.double() for t in _heads(2, 3, 6, 8)), loss=weighted_sum)


def test_attention_dropout_keeps_the_expected_value() -> None:
    twins = Twins(Attention(dropout_p=0.5))
    q, k, _ = _heads(1, 1, 64, 8)
    output = twins.compiled(q, k, torch.ones(1, 1, 64, 8))
    assert not torch.equal(output, torch.ones_like(output))
    assert abs(output.mean().item() - 1.0) < 0.1  # 64 rows of 64 weights, each kept or doubled


class PositionBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=(self.bias * 2)[None])


def test_a_trained_mask_gets_its_gradient() -> None:
    Twins(PositionBias()).assert_equal(torch.randn(3, 2, 5, 4), loss=weighted_sum)
