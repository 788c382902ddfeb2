"""Custom autograd functions that change tensors of their own in place have eager's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from harness.parity import Twins, weighted_sum


class Routed(torch.autograd.Function):
    """Its backward scatters into a value that it has made, and scales the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, gates: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(gates, index)
        picked = torch.zeros_like(gates)
        picked.scatter_(-1, index, 1.0)
        return (gates * picked).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gates, index = ctx.saved_tensors
        (gradient,) = gradients
        gradient = gradient * 2.0
        gradient.mul_(3.0)
        scores = gates * -gradient
        scores[:, 1:].add_(1.0)
        scores.scatter_add_(-1, index, gradient)
        return scores, None, None


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        gates = torch.softmax(scores, -1)
        index = gates.detach().argmax(-1, keepdim=True)
        routed: Tensor = Routed.apply(scores, gates, index)  # type: ignore[no-untyped-call]
        return routed * x


def test_changes_in_place_within_forward_and_backward_are_not_lost() -> None:
    twins = Twins(Router())
    twins.assert_equal(torch.randn(6, 4), loss=weighted_sum, rtol=0.0, atol=0.0)
