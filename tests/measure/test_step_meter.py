"""The bytes of a step that a meter follows."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from thunder_memsave.measure.scratch import memory_profile
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
