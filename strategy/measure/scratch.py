"""How much memory kernels take inside of themselves: measured where the device is there, else bounded.

FakeTensors show every tensor that an operation makes, and not the buffers that a kernel asks the allocator for: those
of flash attention, or the copies in which a bfloat16 product is computed on the CPU. They are measured by running the
operation once on zeros, and kept on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from thunder_memsave.measure.disk_table import DiskTable
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.run_alone import device_type_of, environment, ready_to_run
from thunder_memsave.ops.table import scratch_bytes

_log = logging.getLogger(__name__)


def bounded_scratch(operation: Operation, found: OpProfile) -> int:
    """Return the most that the kernels of an operation take by their row, without running it."""
    layouts = [a.layout for a in operation.arguments if a is not None]
    return scratch_bytes(found.key.partition("[")[0], layouts)


class MeasuredScratch:
    """Runs every kind of operation once, on zeros, and remembers what it took."""

    def __init__(self, *, directory: Path | None = None) -> None:
        """`directory`: of the tables; the user's cache unless given."""
        self._directory = directory
        self._tables: dict[str, DiskTable] = {}

    def __call__(self, operation: Operation, found: OpProfile) -> int:
        """Bytes at the operation's peak beside what `found` says; fewer than 0 where FakeTensors show too many."""
        if found.is_view or not operation.can_run_alone:
            return 0
        table = self._table()
        if (known := table.get(found.key)) is None:
            known = _measured(operation, found)
            if known is None:
                return bounded_scratch(operation, found)
            table.put(found.key, known)
        return max(int(known) - found.peak_bytes, sum(found.made_bytes) - found.peak_bytes)

    def save(self) -> None:
        """Write what was measured."""
        for table in self._tables.values():
            table.save()

    def _table(self) -> DiskTable:
        """Of what holds now: `torch.set_num_threads` may be called at any time, and kernels have buffers per thread."""
        now = f"{environment()}, {_chosen_kernels()}"
        if now not in self._tables:
            self._tables[now] = DiskTable("scratch", now, directory=self._directory)
        return self._tables[now]


def _chosen_kernels() -> str:
    """The user's settings that decide between kernels of one operation, some with buffers and some without."""
    mkldnn = "mkldnn" if torch.backends.mkldnn.enabled else "no mkldnn"
    cudnn = f"cudnn {torch.backends.cudnn.enabled} {torch.backends.cudnn.benchmark}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    return f"{mkldnn}, {cudnn}, deterministic {deterministic}, {precision} float32 products"


def _measured(operation: Operation, found: OpProfile) -> int | None:
    """The operation's peak in bytes; None where it cannot be measured here."""
    device_type = device_type_of(operation)
    if device_type not in ("cpu", "cuda") or torch.autograd._profiler_enabled():
        return None
    try:
        with ready_to_run(operation) as run:
            return _cpu_peak_bytes(run) if device_type == "cpu" else _cuda_peak_bytes(run)
    except (RuntimeError, IndexError, ValueError) as error:  # out of memory, or zeros are refused
        _log.info("%s could not be measured, so its scratch is bounded: %s", found.key, error)
        return None


def _cpu_peak_bytes(run: Callable[[], None]) -> int:
    cpu = [ProfilerActivity.CPU]
    with _quiet(), profile(activities=cpu, profile_memory=True, acc_events=True) as seen:
        run()
    assert seen.profiler is not None
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return int(peak)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Else the profiler writes two lines to stderr for each operation; it reads this once, at its first use."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def _cuda_peak_bytes(run: Callable[[], None]) -> int:
    """Starts the device's statistics of the peak anew."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
