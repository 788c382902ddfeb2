"""The plan of any model keeps its budget for what the allocator is simulated to reserve, expandable segments or not."""

from __future__ import annotations

from typing import get_args

import pytest

from harness.effort import little_effort
from harness.planned_models import MODELS, planned
from thunder_memsave.finetune.plan import run_planner
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.planner.caching_allocator.allocator import CachingAllocator
from thunder_memsave.planner.caching_allocator.replay import replay
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings
from thunder_memsave.planner.reserved import ReservedMemory
from thunder_memsave.planner.step_events import Inside, training_events

BETWEEN = (0.2, 0.6, 1.0)
"""Budgets, as parts of the way from the smallest peak of tensors to what keeping all reserves."""
ALWAYS = {("gpt2", True)}
CASES = [
    pytest.param(n, e, id=f"{n}-{e}", marks=() if (n, e) in ALWAYS else pytest.mark.soak)
    for n in MODELS
    for e in (True, False)
]


def reserved_bytes(plan: RunPlan) -> int:
    assert isinstance(plan.reserved, ReservedMemory)
    return plan.reserved.reserved_bytes


def assert_kept(plan: RunPlan, *, is_expandable: bool) -> None:
    """Torch may allow as many bytes as the budget, and every allocation succeeds in each order."""
    assert plan.fits
    assert plan.budget_bytes is not None
    for inside in get_args(Inside):
        settings = AllocatorSettings(expandable_segments=is_expandable)
        allowed = plan.budget_bytes if plan.call.empties_cache else None
        allocator = CachingAllocator(settings, allowed_bytes=allowed)
        events = training_events(plan.call.program, plan.call.memory, inside=inside)
        replayed = replay(events, allocator)
        assert replayed.peak_reserved_bytes <= plan.budget_bytes
        if not plan.call.empties_cache:
            assert replayed.num_retries == 0
    assert plan.call.empties_cache or reserved_bytes(plan) <= plan.budget_bytes


@pytest.mark.parametrize(("name", "is_expandable"), CASES)
def test_a_budget_is_kept_for_what_is_reserved(
    name: str, is_expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_planner, "_SMALLEST_S", 0.1)
    with little_effort():
        check_budgets(name, is_expandable=is_expandable)


def check_budgets(name: str, *, is_expandable: bool) -> None:
    keep_all = planned(name, None, is_expandable=is_expandable)
    most, least = reserved_bytes(keep_all), keep_all.smallest_bytes
    assert least < most
    fits = []
    for part in BETWEEN:
        budget_bytes = int(least + part * (most - least))
        plan = planned(name, budget_bytes, is_expandable=is_expandable)
        fits.append(plan.fits)
        if not plan.fits:
            assert plan.smallest_bytes > budget_bytes
            plan = planned(name, plan.smallest_bytes, is_expandable=is_expandable)
        assert_kept(plan, is_expandable=is_expandable)
    assert fits[-1]
