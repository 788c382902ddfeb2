"""Ways are tried as long as they can help.

Giving cached memory back does not where tensors alone are too many, nor do smaller tiles of a loss where the peak is
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from thunder_memsave.budget.way_search import WaySearch
from thunder_memsave.budget.ways.way import Way
from thunder_memsave.planner.devices import DEVICES

BUDGET_BYTES = 100


def search(call: Any, *, is_reserved: bool) -> None:
    """Search for the best way of a call."""
    WaySearch(
        call,
        call.tried,
        call.ran,
        budget_bytes=BUDGET_BYTES,
        is_reserved=is_reserved,
        device=DEVICES["h100"],
        data_parallel=None,
    ).best()


@dataclass
class Call:
    """A call that no way makes fit, whose tensors take some bytes in tiles, and some without."""

    whole_bytes: int
    tiled_bytes: int | None
    asked: list[Way] = field(default_factory=list)

    def in_way(self, way: Way) -> Any:
        if way.is_tiled and self.tiled_bytes is None:
            return None
        return SimpleNamespace(way=way, loss_tile_bytes=0, offload=None)

    def tried(self, attempt: Any) -> Any:
        self.asked.append(attempt.way)
        peak_bytes = self.tiled_bytes if attempt.way.is_tiled else self.whole_bytes
        call = SimpleNamespace(profile=SimpleNamespace(peak_bytes=peak_bytes))
        return SimpleNamespace(attempt=attempt, run=SimpleNamespace(more_bytes=9, call=call))

    def ran(self, attempt: Any, tried: Any) -> Any:
        raise AssertionError("nothing fits, so nothing is made quicker")

    def ways(self) -> list[tuple[bool, bool]]:
        search(self, is_reserved=True)
        return [(way.is_tiled, way.empties_cache) for way in self.asked]


@pytest.mark.parametrize(
    ("whole_bytes", "tiled_bytes", "expected"),
    [
        (90, 80, [(False, False), (True, False), (False, True), (True, True)]),
        (101, 80, [(False, False), (True, False), (True, True)]),
        (101, 101, [(False, False), (True, False)]),
        (90, None, [(False, False), (False, True)]),
    ],
)
def test_cached_memory_is_given_back_where_tensors_fit(
    whole_bytes: int, tiled_bytes: int | None, expected: list[tuple[bool, bool]]
) -> None:
    assert Call(whole_bytes, tiled_bytes).ways() == expected


@dataclass
class Losses:
    """A call that fits, whose loss takes some bytes at its peak, or elsewhere."""

    is_at_peak: bool
    solved: list[int] = field(default_factory=list)
    """Divisors of the ways for which plans were solved."""

    def in_way(self, way: Way) -> Any:
        graph = SimpleNamespace(ops=())
        return SimpleNamespace(
            way=way, loss_tile_bytes=40 // way.loss_divisor, graph=graph, offload=None
        )

    def taken_bytes(self, way: Way) -> int:
        return BUDGET_BYTES - (40 - 40 // way.loss_divisor if self.is_at_peak else 0)

    def tried(self, attempt: Any) -> Any:
        self.solved.append(attempt.way.loss_divisor)
        us = 9.0 / attempt.way.loss_divisor
        plan = SimpleNamespace(recompute_us=us, added_us=us)
        run, offer = SimpleNamespace(more_bytes=0), SimpleNamespace(plan=plan)
        return SimpleNamespace(attempt=attempt, run=run, offer=offer)

    def ran(self, attempt: Any, tried: Any) -> Any:
        of, before = self.taken_bytes(attempt.way), self.taken_bytes(tried.attempt.way)
        return SimpleNamespace(more_bytes=of - before)


@pytest.mark.parametrize(("is_at_peak", "divisors"), [(True, [1, 4, 16]), (False, [1])])
def test_plans_are_solved_for_smaller_losses_only_where_these_are_at_the_peak(
    is_at_peak: bool, divisors: list[int]
) -> None:
    losses = Losses(is_at_peak)
    search(losses, is_reserved=False)
    assert losses.solved == divisors


@dataclass
class TooLarge(Losses):
    """One that does not fit with its largest tiles."""

    more_bytes: int = 30

    def in_way(self, way: Way) -> Any:
        return None if way.is_tiled else super().in_way(way)

    def tried(self, attempt: Any) -> Any:
        tried = super().tried(attempt)
        tried.offer.plan.recompute_us = 0.0
        call = SimpleNamespace(profile=SimpleNamespace(peak_bytes=BUDGET_BYTES + 1))
        tried.run = SimpleNamespace(more_bytes=self._more_bytes(attempt.way), call=call)
        return tried

    def ran(self, attempt: Any, tried: Any) -> Any:
        return SimpleNamespace(more_bytes=self._more_bytes(attempt.way))

    def _more_bytes(self, way: Way) -> int:
        return self.more_bytes + self.taken_bytes(way) - BUDGET_BYTES


@pytest.mark.parametrize(
    ("is_at_peak", "more_bytes", "divisors"),
    [(True, 30, [1, 4]), (True, 35, [1, 4, 16]), (True, 39, [1, 4, 16]), (False, 30, [1])],
)
def test_no_plans_are_solved_for_smaller_losses_with_which_one_that_is_refused_needs_no_less(
    is_at_peak: bool, more_bytes: int, divisors: list[int]
) -> None:
    losses = TooLarge(is_at_peak, more_bytes=more_bytes)
    search(losses, is_reserved=True)
    assert losses.solved == divisors


@dataclass(frozen=True)
class Copying:
    """An attempt that may copy to the host, of a call that fits without copies, or in tiles."""

    way: Way = field(default_factory=Way)
    offload: Any = field(default_factory=lambda: SimpleNamespace(is_last_resort=False))
    loss_tile_bytes: int = 0

    def in_way(self, way: Way) -> Copying:
        return replace(self, way=way)


def test_what_does_not_fit_with_copies_is_tried_without_before_it_is_tiled() -> None:
    asked: list[tuple[bool, bool]] = []

    def tried(attempt: Any) -> Any:
        asked.append((attempt.way.is_tiled, attempt.offload is None))
        fits = attempt.way.is_tiled or attempt.offload is None
        call = SimpleNamespace(profile=SimpleNamespace(peak_bytes=BUDGET_BYTES))
        run = SimpleNamespace(more_bytes=0 if fits else 9, call=call)
        return SimpleNamespace(attempt=attempt, run=run)

    call: Any = SimpleNamespace(in_way=Copying().in_way, tried=tried, ran=None)
    search(call, is_reserved=True)
    assert asked == [(False, False), (False, True)]
