"""What a plan's run leaves of the budget is used by one more plan, less than one that was refused, if one was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from thunder_memsave.budget.memory_planner import MemoryPlanner

BUDGET = 2000


@dataclass
class Tries:
    """Plans of as many bytes as are asked for, whose runs take more or less."""

    taken: Callable[[int], int]
    lacks: Callable[[int], int] = lambda _: 0
    """The bytes that are lacking for copies that overlap, which save a second."""
    is_reserved: bool = True
    targets: list[int] = field(default_factory=list)

    def offer(self, attempt: Any, structure: str, target_bytes: int, too_large: Any) -> Any:
        self.targets.append(target_bytes)
        plan = SimpleNamespace(
            actions=target_bytes,
            recompute_us=float(2 * BUDGET - target_bytes),
            added_us=float(2 * BUDGET - target_bytes),
        )
        return SimpleNamespace(plan=plan, bound_bytes=None, is_smallest=False)

    def run(self, attempt: Any, plan: Any, budget_bytes: int, *, target_bytes: int) -> Any:
        more_bytes = self.taken(plan.actions) - budget_bytes
        added_us = 1e6 * bool(lacks := self.lacks(plan.actions)) + plan.added_us
        return SimpleNamespace(
            more_bytes=more_bytes, overlap_lacks=lacks, added_us=added_us, joins_pay=None
        )

    def found(self) -> int:
        planner: Any = MemoryPlanner.__new__(MemoryPlanner)
        planner._budget_bytes, planner._asked, planner._data_parallel = BUDGET, None, None
        planner._joins_pay = None
        planner._limit = SimpleNamespace(is_reserved=self.is_reserved)
        planner._rank_zeros, planner._within = self.offer, self.run
        actions: int = planner._tried(SimpleNamespace(), "").offer.plan.actions
        return actions


@pytest.mark.parametrize(
    ("taken", "targets", "found"),
    [
        (lambda target: target, [2000], 2000),
        (lambda target: target + (200 if target > 1900 else 40), [2000, 1800, 1880], 1880),
        (lambda target: target + (200 if target > 1840 else 40), [2000, 1800, 1880], 1800),
        (lambda target: target + (200 if target > 1900 else 198), [2000, 1800], 1800),
        (lambda target: 2001 if target > 1996 else target, [2000, 1998, 1996], 1996),
    ],
    ids=[
        "the first fits",
        "one between fits",
        "one between does not",
        "nothing is left",
        "less than a step is lacking",
    ],
)
def test_what_is_left_is_tried_once(
    taken: Callable[[int], int], targets: list[int], found: int
) -> None:
    tries = Tries(taken)

    assert tries.found() == found
    assert tries.targets == targets


@pytest.mark.parametrize(
    ("taken", "targets", "found"),
    [
        (lambda target: target - 100, [2000, 2090], 2090),
        (lambda target: target - (100 if target <= 2000 else 80), [2000, 2090], 2000),
        (lambda target: target - 10, [2000], 2000),
        (lambda target: target + (200 if target > 1900 else 40), [2000, 1800, 1880], 1880),
    ],
    ids=["passes save as much again", "passes save less", "too little is left", "one was refused"],
)
def test_what_passes_save_of_a_budget_of_tensors_is_planned_for(
    taken: Callable[[int], int], targets: list[int], found: int
) -> None:
    tries = Tries(taken, is_reserved=False)
    assert tries.found() == found
    assert tries.targets == targets


@pytest.mark.parametrize(
    ("lacks", "targets", "found"),
    [
        (lambda target: max(0, target - 1970), [2000, 1940], 1940),
        (lambda target: 3 * (target > 1985), [2000, 1990, 1980], 1980),  # a two-hundredth at least
        (lambda _: 50, [2000, 1900, 1800, 1700], 2000),  # they never overlap
    ],
)
def test_less_is_planned_where_copies_overlap_then(
    lacks: Callable[[int], int], targets: list[int], found: int
) -> None:
    tries = Tries(lambda target: target, lacks)
    assert tries.found() == found
    assert tries.targets == targets
