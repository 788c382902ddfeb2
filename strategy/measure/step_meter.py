"""Follows the bytes of tensors on one device through parts of a step, with marks that a caller sets in between.

    meter = step_meter(device)
    with meter.running():
        work()
        meter.mark()
        work()

On CUDA the allocator counts. On the CPU nothing does, so PyTorch's profiler records every allocation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import profile, record_function
from typing_extensions import override

from thunder_memsave.collector import collector
from thunder_memsave.measure.scratch import memory_events, memory_profile, quiet_profiler

_MARK = "thunder_memsave.mark"


@dataclass(frozen=True, slots=True)
class Point:
    """The bytes of tensors when a mark was set, beside those at the first start."""

    live_bytes: int
    peak_bytes: int
    """The most since the mark before."""


class StepMeter(ABC):
    """Follows bytes while it runs."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        """One for each mark, once the meter has stopped."""

    @property
    @abstractmethod
    def can_run(self) -> bool:
        """Whether it can start now."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Follow bytes; it may run several times, one after the other.

        Python's collector does not run meanwhile: bytes of older garbage that it frees would count as room.
        """
        with collector(runs=False):
            self._start()
            try:
                yield
            finally:
                self._stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens here, within `running`, nor what stays of it."""
        self._stop()
        try:
            with collector(runs=True):
                yield
        finally:
            self._start()

    @abstractmethod
    def mark(self) -> None:
        """End an interval; only while it runs."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...


class CpuMeter(StepMeter):
    """Adds up the profiler's memory events, those of kernels' scratch included."""

    def __init__(self) -> None:
        super().__init__()
        self._profile: profile | None = None
        self._blocks: dict[int, int] = {}
        """Bytes of the blocks that were allocated here and not freed, by address."""
        self._live_bytes = self._peak_bytes = 0

    @property
    @override
    def can_run(self) -> bool:
        """Whether no other profiler runs: PyTorch has one at a time."""
        return not torch.autograd._profiler_enabled()

    @override
    def mark(self) -> None:
        with record_function(_MARK):
            pass

    @override
    def _start(self) -> None:
        with quiet_profiler():
            self._profile = memory_profile().__enter__()

    @override
    def _stop(self) -> None:
        ended, self._profile = self._profile, None
        assert ended is not None, "it runs"
        with quiet_profiler():
            ended.__exit__(None, None, None)
        for event in memory_events(ended, mark=_MARK):
            if event is None:
                self.points.append(Point(self._live_bytes, self._peak_bytes))
                self._peak_bytes = self._live_bytes
                continue
            # What was freed unseen left its address to another block; what is freed and not known is older.
            self._live_bytes -= self._blocks.pop(event.address, 0)
            if event.nbytes > 0:
                self._blocks[event.address] = event.nbytes
                self._live_bytes += event.nbytes
                self._peak_bytes = max(self._peak_bytes, self._live_bytes)


class CudaMeter(StepMeter):
    """Asks PyTorch's allocator, whose record of the peak it sets back."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._ignored_bytes: int | None = None
        self._peak_bytes = 0

    @property
    @override
    def can_run(self) -> bool:
        """It always can."""
        return True

    @override
    def mark(self) -> None:
        live, peak = self._read()
        self.points.append(Point(live, max(peak, self._peak_bytes)))
        self._peak_bytes = 0
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    @override
    def paused(self) -> Iterator[None]:
        live, peak = self._read()
        self._peak_bytes = max(peak, self._peak_bytes)
        try:
            with collector(runs=True):
                yield
        finally:
            assert self._ignored_bytes is not None, "it runs"
            self._ignored_bytes += self._read()[0] - live
            torch.cuda.reset_peak_memory_stats(self._device)

    def _read(self) -> tuple[int, int]:
        ignored = self._ignored_bytes or 0
        allocated = torch.cuda.memory_allocated(self._device)
        return allocated - ignored, torch.cuda.max_memory_allocated(self._device) - ignored

    @override
    def _start(self) -> None:
        if self._ignored_bytes is None:
            self._ignored_bytes = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    @override
    def _stop(self) -> None:
        self._peak_bytes = 0


def step_meter(device: torch.device) -> StepMeter:
    """Return a meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
