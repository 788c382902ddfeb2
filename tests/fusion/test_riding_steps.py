"""Values that a fused backward computes beside their readers: no plan keeps them, and steps have the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from harness.fused_steps import WIDTH, Ran, step
from thunder_memsave.budget import memory_planner
from thunder_memsave.budget.planned_call import Attempt, PlannedCall
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


class Gated(nn.Module):
    """A gated layer: what the gradient of `down`'s weight reads can be made of what the gate's gradient reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.gate(x)) * self.up(x))


class GatedModel(Model):
    def __init__(self, num_layers: int = 3) -> None:
        super().__init__(0)
        self.layers.extend(Gated() for _ in range(num_layers))


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


@cache
def all_kept() -> Ran:
    return step(GatedModel, {"x": X}, fusion=True)


def within(part: float) -> Ran:
    """A plan that lacks a part of what keeping all keeps."""
    call = all_kept().call
    assert call.plan is not None
    budget_bytes = call.profile.peak_bytes - int(part * call.plan.saved_bytes)
    return step(GatedModel, {"x": X}, fusion=True, policy="plan", budget_bytes=budget_bytes)


def within_alone(part: float) -> Ran:
    """The same where what joins kernels would hold too much."""
    run = Attempt.run

    def larger(attempt: Attempt, *args: Any, joins: bool = False) -> PlannedCall:
        call = run(attempt, *args, joins=joins)
        more = 10**9 if joins else 0
        profile = replace(call.profile, peak_bytes=call.profile.peak_bytes + more)
        return replace(call, profile=profile)

    with patch.object(Attempt, "run", larger):
        return within(part)


def test_where_joining_is_slower_the_plan_does_not_count_on_it() -> None:
    us = iter((2.0, 1.0))  # joined, then alone: once, as nothing joins in what follows
    with patch.object(memory_planner, "forward_and_backward_us", lambda *_: next(us)):
        found = within(0.2)
    assert not found.call.joins
    assert not any(op.joins for op in found.call.graph.ops)
    assert all(map(torch.equal, found.bits, all_kept().bits))


def test_what_joins_a_kernel_has_the_same_bits_and_the_bytes_predicted() -> None:
    found, kept = within(0.2), all_kept()
    assert found.call.joins
    assert len([op for op in found.call.graph.ops if op.joins]) == 3
    assert found.predicted_bytes == found.measured_bytes
    assert found.predicted_bytes < kept.predicted_bytes
    assert all(map(torch.equal, found.bits, kept.bits))


def test_a_product_that_joins_is_one_more_result_of_a_region_and_costs_its_own_bytes() -> None:
    alone, found = within_alone(0.2), within(0.2)
    of_product = 4 * X_BYTES
    assert found.call.plan is not None
    assert alone.call.plan is not None
    kept, graph = found.call.plan.actions.kept, found.call.graph
    assert kept == alone.call.plan.actions.kept
    names = [graph.storages[op.makes[0]].name for op in graph.ops if op.joins]
    num_moved = sum(name not in kept for name in names)
    assert num_moved > 0
    # Both of its factors are read anyway, at least one where the kernel would hold too much with all in it.
    saved = alone.moved_bytes - found.moved_bytes
    assert num_moved * of_product <= saved <= num_moved * 2 * of_product
    assert all(map(torch.equal, found.bits, alone.bits))


def test_where_joining_holds_too_much_nothing_joins_and_the_time_is_of_that() -> None:
    joined, found = within(0.2), within_alone(0.2)
    assert not found.call.joins
    assert all(map(torch.equal, found.bits, joined.bits))
    assert found.call.plan is not None
    assert joined.call.plan is not None
    assert found.call.plan.recompute_us > joined.call.plan.recompute_us


def test_policies_without_prices_let_nothing_join() -> None:
    for policy in ("keep_all", "recompute_all"):
        fused, unfused = (
            step(GatedModel, {"x": X}, fusion=f, policy=policy) for f in (True, False)
        )
        assert not fused.call.joins
        assert fused.order_of("mm") == unfused.order_of("mm")
