from __future__ import annotations

import time

import pytest

from thunder_memsave.planner.linear.pace import Pace


def began(*, wall_s: float, own_s: float) -> Pace:
    """Return a pace that began so many seconds ago."""
    return Pace(start_wall_s=time.perf_counter() - wall_s, start_own_s=time.thread_time() - own_s)


def test_a_busy_machine_takes_longer_by_the_measured_ratio() -> None:
    assert began(wall_s=400.0, own_s=100.0).wall_s(2.0) == pytest.approx(8.0, rel=1e-2)


def test_an_idle_machine_takes_no_longer() -> None:
    assert began(wall_s=100.0, own_s=100.0).wall_s(2.0) == pytest.approx(2.0, rel=1e-2)
    assert began(wall_s=0.0, own_s=50.0).slowdown == 1.0


def test_a_pace_that_just_began_has_measured_nothing() -> None:
    assert Pace().slowdown == pytest.approx(1.0, abs=0.5)
