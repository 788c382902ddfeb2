"""Values that a fused backward computes beside their readers: no plan keeps them, and steps have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.fused_steps import WIDTH, Ran, step
from thunder_memsave.fusion.region import PREFIX


class Product(nn.Module):
    """Of three linears: backward reads the product of two beside both of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = (linear(x) for linear in self.linears)
        return x + self.down(first * second * third)


class Model(nn.Module):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Product() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


X = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
X_BYTES = X.numel() * X.element_size()


def ran(*, fusion: bool, policy: str = "keep_all") -> Ran:
    return step(Model, {"x": X}, fusion=fusion, policy=policy)


def test_a_fused_step_that_keeps_all_is_smaller_by_what_rides_and_has_the_same_bits() -> None:
    fused, unfused = ran(fusion=True), ran(fusion=False)
    assert fused.call.plan is not None
    assert unfused.call.plan is not None
    assert unfused.call.plan.saved_bytes - fused.call.plan.saved_bytes == 3 * X_BYTES
    assert fused.predicted_bytes == fused.measured_bytes
    # At the end of forward; the unfused step holds the last of them alone when it holds the most.
    assert unfused.measured_bytes - fused.measured_bytes > 2.9 * X_BYTES
    assert all(map(torch.equal, fused.bits, unfused.bits))
    again = ran(fusion=True, policy="recompute_all")
    assert all(map(torch.equal, fused.bits, again.bits))


def test_what_rides_is_computed_in_a_region_and_moves_no_byte_more() -> None:
    fused, unfused = ran(fusion=True), ran(fusion=False)
    repeated = [s.op.symbol for s in fused.call.program.steps if s.is_repeated and s.makes]
    assert all(name.startswith(PREFIX) for name in repeated), repeated
    moved = [r.moved_bytes for r in (fused, unfused)]
    # Of each layer, forward writes a product less and reads it less, backward reads one product less.
    assert moved[1] - moved[0] >= 3 * 3 * X_BYTES


def test_the_plan_says_why_it_is_recomputed() -> None:
    plan = ran(fusion=True).call.plan
    assert plan is not None
    reasons = [d.reason for d in plan.decisions if d.reason.startswith("part of a kernel")]
    assert len(reasons) == 3
    assert plan.recompute_us == 0.0
