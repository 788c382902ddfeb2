"""Collectives in flight during computation stay within the budget, in evaluation too, and on every rank alike."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.traces import fake_ranks
from thunder_memsave.budget import memory_planner
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.agreement import broadcast
from thunder_memsave.measure.devices import device_at
from thunder_memsave.passes.overlap.room import NO_ROOM, Room
from thunder_memsave.sharding.rows import shard_module

WIDTH = 32
WEIGHT_BYTES = 4 * WIDTH * WIDTH
WINDOW_BYTES = 10**9


def evaluated(
    *batch_sizes: int, budget_bytes: int | None, prefetch: int = WINDOW_BYTES
) -> list[PlannedCall]:
    """Return planned calls of one module without gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers).eval()
    with fake_ranks(64) as data_parallel, torch.no_grad():
        data_parallel = replace(data_parallel, prefetch=prefetch)
        shard_module(model, data_parallel)
        planner = planner_of(budget_bytes, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
        for size in batch_sizes:
            module(torch.ones(size, WIDTH))
    return planner.calls


def planner_of(budget_bytes: int | None, data_parallel: Any = None) -> MemoryPlanner:
    return MemoryPlanner(
        MemoryConfig(),
        device=device_at(torch.device("cpu")),
        budget_bytes=budget_bytes,
        data_parallel=data_parallel,
    )


@pytest.fixture(scope="module")
def at_once_bytes() -> int:
    (call,) = evaluated(2, budget_bytes=None, prefetch=0)
    return call.profile.peak_bytes


def test_an_evaluation_gathers_ahead_as_far_as_the_budget_has_room(at_once_bytes: int) -> None:
    (free,) = evaluated(2, budget_bytes=None)
    budget_bytes = at_once_bytes + 4 * WEIGHT_BYTES
    assert free.profile.peak_bytes > budget_bytes
    (call,) = evaluated(2, budget_bytes=budget_bytes)
    assert call.plan is None
    assert at_once_bytes < call.profile.peak_bytes <= budget_bytes


def test_an_evaluation_that_fits_is_not_limited() -> None:
    (free,) = evaluated(2, budget_bytes=None)
    (call,) = evaluated(2, budget_bytes=free.profile.peak_bytes)
    assert call.profile.step_peak_bytes == free.profile.step_peak_bytes


def test_an_evaluation_beyond_the_budget_is_told_of(
    at_once_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        evaluated(2, budget_bytes=at_once_bytes)
        assert not caplog.messages
        (call,) = evaluated(2, budget_bytes=at_once_bytes - 1)
    assert call.profile.peak_bytes == at_once_bytes
    (message,) = caplog.messages
    assert message == (
        f"this call without gradients needs {at_once_bytes:,} bytes, and the budget is {at_once_bytes - 1:,}; "
        "evaluate smaller batches, the longest of them first, or give a larger memory.budget."
    )


def test_ranks_agree_once_for_evaluations_of_all_lengths(
    at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    agree = broadcast

    def counted(value: Any, data_parallel: Any) -> Any:
        asked.append(value)
        return agree(value, data_parallel)

    monkeypatch.setattr(memory_planner, "broadcast", counted)
    budget_bytes = at_once_bytes + 2 * WEIGHT_BYTES
    evaluated(2, budget_bytes=budget_bytes)
    num_asked = len(asked)
    first, second = evaluated(2, 1, budget_bytes=budget_bytes)
    assert len(asked) == 2 * num_asked > 0
    assert second.profile.peak_bytes < first.profile.peak_bytes


def test_ranks_that_evaluate_otherwise_gather_when_they_need_it(
    at_once_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_planner, "broadcast", lambda value, data_parallel: "rank 0's")
    (call,) = evaluated(2, budget_bytes=10**9)
    assert call.profile.peak_bytes == at_once_bytes


@dataclass
class Call:
    """A call with a peak of 100 bytes, and as many in flight as its room allows."""

    room_taken: Room | None

    @property
    def profile(self) -> Any:
        left = {} if self.room_taken is None else self.room_taken.left_bytes
        in_flight = 1000 if self.room_taken is None else left.get("t", 0)
        return type("Profile", (), {"peak_bytes": 100 + in_flight})

    def room(self, budget_bytes: int) -> Room:
        return Room(left_bytes={"t": budget_bytes - 100}, start_bytes={})


@dataclass
class Communicating:
    """Stands in for an attempt, and records the rooms with which it ran."""

    communicates = True
    collective_bytes = 50
    rooms: list[Room | None] = field(default_factory=list)

    def joins(self, plan: Any) -> dict[str, str]:
        return {}

    def run(self, plan: Any, room: Room | None, *, joins: bool = False) -> Call:
        self.rooms.append(room)
        return Call(room)


def within(
    monkeypatch: pytest.MonkeyPatch,
    budget_bytes: int,
    *others: int,
    takes: int = -1,
    beside_bytes: int = 0,
) -> list[int | str]:
    """Return the bytes of the rooms that are tried, if another rank needs `others` more bytes in each.

    `takes`: which of them is taken; the last unless given. `beside_bytes`: what the allocator takes beside tensors.
    """
    more = iter(others)
    planner, attempt = planner_of(budget_bytes), Communicating()

    def limited(call: Call) -> int:
        return int(call.profile.peak_bytes) + beside_bytes

    monkeypatch.setattr(planner, "_limited_bytes", limited)
    monkeypatch.setattr(memory_planner, "largest", lambda nbytes, _: nbytes + next(more))
    run = planner._within(attempt, None, budget_bytes)  # type: ignore[arg-type]
    assert run.room is attempt.rooms[takes]
    assert next(more, None) is None
    return [
        "any" if r is None else "none" if r is NO_ROOM else r.left_bytes["t"] for r in attempt.rooms
    ]


def test_a_rank_that_needs_more_leaves_less_room_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(monkeypatch, 200, 0, 0, 30, 30) == ["any", "none", 100, 70]


def test_where_no_room_holds_on_all_ranks_nothing_is_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = within(monkeypatch, 200, 0, 0, 30, 40, 50, takes=1)
    assert tried == ["any", "none", 100, 70, 60]


def test_room_is_what_the_allocator_leaves_beside_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = within(monkeypatch, 200, 0, 0, 0, beside_bytes=30)
    assert tried == ["any", "none", 70]


def test_a_plan_near_its_target_is_limited_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, attempt = planner_of(200), Communicating()
    plan = SimpleNamespace(predicted_peak_bytes=100)

    def rooms(target_bytes: int) -> list[Room | None]:
        attempt.rooms.clear()
        planner._within(attempt, plan, 200, target_bytes=target_bytes)  # type: ignore[arg-type]
        return [attempt.rooms[0]]

    monkeypatch.setattr(planner, "_limited_bytes", lambda call: call.profile.peak_bytes)
    assert rooms(150) == [None]
    assert rooms(149) == [NO_ROOM]


def test_where_one_rank_has_no_room_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(monkeypatch, 200, 0, 101) == ["any", "none"]
