"""The bytes of a step that a meter follows."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from thunder_memsave.measure import step_meter
from thunder_memsave.measure.scratch import Block, memory_profile
from thunder_memsave.measure.step_meter import CpuMeter

NBYTES = 4096


class Cycle:
    """Once dropped, garbage that only Python's collector frees."""

    def __init__(self, tensor: Tensor) -> None:
        self.myself, self.tensor = self, tensor


def test_older_garbage_that_the_collector_frees_is_no_room() -> None:
    meter = CpuMeter()
    with memory_profile():  # the allocator reports no end of what it did not see begin
        older = [torch.empty(NBYTES, dtype=torch.uint8)]
    with meter.running():
        with meter.paused():
            assert gc.isenabled()
        Cycle(older.pop())
        for _ in range(2):  # enough that the collector would run
            lists: list[list[int]] = [[] for _ in range(2 * gc.get_threshold()[0])]
            del lists
        live = torch.empty(NBYTES, dtype=torch.uint8)
        meter.mark()
    assert gc.isenabled()
    assert [p.live_bytes for p in meter.points] == [live.nbytes]


def test_what_was_there_before_and_is_freed_is_no_room() -> None:
    meter = CpuMeter()
    with memory_profile():
        older = [torch.empty(NBYTES, dtype=torch.uint8)]
    with meter.running():
        older.clear()
        live = torch.empty(NBYTES, dtype=torch.uint8)
        meter.mark()
    assert [(p.live_bytes, p.peak_bytes) for p in meter.points] == [(live.nbytes, live.nbytes)]


def test_what_was_freed_unseen_ends_when_its_address_is_another_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = [[Block(1, 100), Block(2, 10), None], [None, Block(1, 70), Block(2, -10), None]]
    monkeypatch.setattr(step_meter, "memory_events", lambda *_, **__: seen.pop(0))
    meter = CpuMeter()
    for _ in range(2):
        with meter.running():
            pass
    assert [(p.live_bytes, p.peak_bytes) for p in meter.points] == [
        (110, 110),
        (110, 110),
        (70, 110),
    ]
