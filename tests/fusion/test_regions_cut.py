"""What regions take in: concatenations with memory of their own, views before them, and what reads through views."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.fused_steps import WIDTH, Ran, step

HEADS = 4
X = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1))


class Turned(nn.Module):
    """A rotary embedding between products of matrices, whose gradient is laid out anew."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.outer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.turn = nn.Parameter(torch.linspace(0, 1, WIDTH // HEADS), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer, strict=True):
            heads = inner(x).view(*x.shape[:-1], HEADS, -1).transpose(1, 2)
            first, second = heads.chunk(2, dim=-1)
            turned = heads * self.turn + torch.cat([-second, first], dim=-1) * (1 - self.turn)
            scores = turned @ turned.transpose(-2, -1)
            x = x + outer((scores @ heads).transpose(1, 2).reshape(x.shape))
        return x.square().mean()


def ran(*, fusion: bool) -> Ran:
    return step(Turned, {"x": X}, fusion=fusion)


def test_a_concatenation_is_in_a_region_with_what_reads_it() -> None:
    fused, unfused = ran(fusion=True), ran(fusion=False)
    # In each layer's forward, and in its backward, where the gradients of the halves become one.
    assert unfused.order_of("cat").count("aten_cat") == 4
    assert fused.order_of("cat") == []
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert fused.predicted_bytes == fused.measured_bytes <= unfused.measured_bytes


def test_copies_that_read_through_views_are_in_regions_too() -> None:
    fused, unfused = ran(fusion=True), ran(fusion=False)
    clones = [len(r.order_of("clone")) for r in (unfused, fused)]
    assert clones[1] < clones[0]


def test_views_that_a_region_alone_reads_are_made_in_it() -> None:
    """The halves of the heads, which are no views of the trace any more."""
    fused, unfused = ran(fusion=True), ran(fusion=False)
    views = [len(r.order_of("slice_Tensor", "split")) for r in (unfused, fused)]
    assert views[0] >= 2
    assert views[1] == 0
