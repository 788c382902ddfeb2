"""Finds the scratch of kernels, bytes that they allocate inside: measured if the device is here, else bounded.

FakeTensors show every tensor that an operation makes, but not the buffers that a kernel requests from the allocator:
those of flash attention, or the copies in which a bfloat16 product is computed on the CPU. They are measured by running
the operation once on zeros, and kept on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from thunder_memsave.aten.record import storage_id
from thunder_memsave.measure.disk_table import DiskTable
from thunder_memsave.measure.layouts import Value, layout_of, on_planned_device
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.run_alone import device_type_of, environment, ready_to_run
from thunder_memsave.ops.table import scratch_bytes

_log = logging.getLogger(__name__)

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_MEMORY = "[memory]"
"""Name that PyTorch's profiler gives to allocations and frees."""
_WITH_SCRATCH = (torch.bfloat16, torch.float16)


def bounded_scratch(operation: Operation, found: OpProfile, *, device_type: str = "") -> int:
    """Return the most that the kernels of an operation take by their row, without running it.

    Args:
        operation: The operation, with its arguments.
        found: Its profile.
        device_type: The planned device's, if the arguments stand in for tensors there; empty: that of the arguments.
    """
    operands = on_planned_device(operation.arguments, device_type)
    return scratch_bytes(found.key.partition("[")[0], operands)


class MeasuredScratch:
    """Runs every kind of operation once, on zeros, and stores its scratch."""

    def __init__(self, *, directory: Path | None = None) -> None:
        """`directory` of the tables: the user's cache unless given."""
        self._directory = directory
        self._tables: dict[str, DiskTable] = {}

    def __call__(self, operation: Operation, found: OpProfile) -> int:
        """Return the bytes at the operation's peak beyond those of `found`; negative if FakeTensors show too many."""
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
        """Write the measured bytes to disk."""
        for table in self._tables.values():
            table.save()

    def _table(self) -> DiskTable:
        """Return the table for the current settings: `torch.set_num_threads` may change buffers at any time."""
        now = f"{environment()}, {_chosen_kernels()}"
        if now not in self._tables:
            self._tables[now] = DiskTable("scratch", now, directory=self._directory)
        return self._tables[now]


@cache
def measured_scratch() -> MeasuredScratch:
    """Return the one table of scratch for all models of this process."""
    return MeasuredScratch()


def product_scratch(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object
) -> int:
    """Return the bytes at the peak of an ATen operator beyond its result: 0 unless it is a product on the CPU.

    Products of bfloat16 and float16 are computed there by kernels that copy their operands.

    Args:
        func: The operator.
        args: Its arguments; tensors may be without data.
        kwargs: Those that are named.
        result: What it gave for them.
    """
    if func not in _PRODUCTS or not isinstance(result, Tensor):
        return 0
    if result.device.type != "cpu" or result.dtype not in _WITH_SCRATCH:
        return 0
    numbers: dict[int, int] = {}
    values = [Value(layout_of(t), numbers.setdefault(storage_id(t), len(numbers))) for t in args]
    nbytes = result.untyped_storage().nbytes()
    found = OpProfile(
        results=(Value(layout_of(result), len(numbers)),),
        num_argument_storages=len(numbers),
        made_bytes=(nbytes,),
        peak_bytes=nbytes,
        key=f"{func}{values}{dict(kwargs)}",
    )
    operation = Operation(partial(func, **kwargs), values, can_run_alone=True)
    with _disable_current_modes():
        return max(measured_scratch()(operation, found), 0)


def _chosen_kernels() -> str:
    """Describe the user's settings that decide between kernels of one operation, some of which have buffers."""
    mkldnn = "mkldnn" if torch.backends.mkldnn.enabled else "no mkldnn"
    cudnn = f"cudnn {torch.backends.cudnn.enabled} {torch.backends.cudnn.benchmark}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    return f"{mkldnn}, {cudnn}, deterministic {deterministic}, {precision} float32 products"


def _measured(operation: Operation, found: OpProfile) -> int | None:
    """Return the operation's peak in bytes; None if it cannot be measured here."""
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
    with quiet_profiler(), memory_profile() as seen:
        run()
    live = peak = 0
    for event in memory_events(seen):
        live += 0 if event is None else event.nbytes
        peak = max(peak, live)
    return peak


def memory_profile() -> profile:
    """Return a profile that records allocations on the CPU."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


@dataclass(frozen=True, slots=True)
class Block:
    """An allocation, or with negative bytes a free."""

    address: int
    nbytes: int


def memory_events(seen: profile, *, mark: str | None = None) -> Iterator[Block | None]:
    """Yield the allocations and frees that an ended profile saw, in order, and None for events named `mark`."""
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    later = deque(seen.profiler.kineto_results.experimental_event_tree())
    found: list[Any] = []
    while later:
        event = later.popleft()
        later.extend(event.children)
        if event.name in (_MEMORY, mark):
            found.append(event)
    for event in sorted(found, key=lambda e: e.start_time_ns):
        if event.name == mark:
            yield None
        else:
            yield Block(event.extra_fields.ptr, event.extra_fields.alloc_size)


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler from writing two lines to stderr per operation; it reads this variable at its first use."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def _cuda_peak_bytes(run: Callable[[], None]) -> int:
    """Return the peak of a run; resets the device's peak statistics."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
