"""Cross entropy equals eager's in every reduction, with ignored rows, weights, label smoothing and more dims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum


class Loss(nn.Module):
    weight: Tensor | None

    def __init__(self, reduction: str, weighted: bool, label_smoothing: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("weight", torch.arange(1.0, 5.0) if weighted else None)
        self.reduction, self.label_smoothing = reduction, label_smoothing

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(x).movedim(-1, min(1, x.ndim - 1))
        return F.cross_entropy(
            logits,
            target,
            weight=self.weight,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_with_ignored_rows_equals_eager(
    reduction: str, weighted: bool, label_smoothing: float
) -> None:
    twins = Twins(Loss(reduction, weighted, label_smoothing))
    for shape, target in (
        ((4,), torch.tensor(2)),
        ((3, 4), torch.tensor([0, -100, 3])),
        ((2, 3, 4), torch.tensor([[0, -100, 3], [1, 1, -100]])),
    ):
        twins.assert_equal(torch.randn(shape), target, loss=weighted_sum)
