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
from thunder_memsave.measure.op_profile import Layout, Operation, OpProfile
from thunder_memsave.measure.run_alone import device_type_of, environment, ready_to_run

_log = logging.getLogger(__name__)

_ROWS, _COLUMNS = 128, 32
"""Flash attention's backward rounds sequences and head dimensions up to these (flash_attn/flash_api.cpp)."""


def bounded_scratch(operation: Operation, found: OpProfile) -> int:
    """The most that the kernels of an operation take, from their source, without running it.

    - CUDA flash attention, backward (pytorch's flash_api.cpp, `mha_bwd`): a float32 gradient of the query, a float32
      number per row, both with rounded sizes, and where key heads are shared one gradient of key and value per query
      head.
    - CPU flash attention (FlashAttentionKernel.cpp): per thread one block of scores and of the output in float32.
    - Indexing's backward on CUDA (Embedding.cu): four sorted lists of the indices, in int64.

    All other operations have none beyond what libraries keep for good: cuBLAS's workspace is part of the reserve.
    """
    symbol = found.key.partition("[")[0]
    layouts = [a.layout for a in operation.arguments if a is not None]
    if not layouts or ("attention" not in symbol and "sdp" not in symbol):
        return _of_indices(symbol, layouts)
    if layouts[0].device.startswith("cpu"):
        return _cpu_flash_bytes(layouts)
    is_backward = "backward" in symbol or "bwd" in symbol
    return _cuda_flash_backward_bytes(layouts) if is_backward else 0


def _of_indices(symbol: str, layouts: list[Layout]) -> int:
    if "embedding" not in symbol or "backward" not in symbol:
        return 0
    indices = [v for v in layouts if v.dtype == torch.int64 and not v.device.startswith("cpu")]
    return sum(4 * 8 * _numel(v) for v in indices)


def _cpu_flash_bytes(layouts: list[Layout]) -> int:
    head_dim = layouts[0].shape[-1]
    rows, columns = 256, 512  # the largest blocks that the kernel chooses
    per_thread = rows * columns + 2 * rows + rows * head_dim
    return torch.get_num_threads() * (4 * per_thread + 2 * rows * columns)


def _cuda_flash_backward_bytes(layouts: list[Layout]) -> int:
    """The first three of four dimensions are batch, heads and rows, in either order."""
    of_four = [v for v in layouts if len(v.shape) == 4]
    if len(of_four) < 4:
        return 0
    _, query, key, _ = of_four[:4]
    batch, heads, rows, head_dim = query.shape
    rows, head_dim = _rounded(rows, _ROWS), _rounded(head_dim, _COLUMNS)
    accumulated = 4 * batch * heads * rows * (head_dim + 1)
    shares_keys = _numel(key) < _numel(query)
    expanded = 2 * query.dtype.itemsize * _numel(query) if shares_keys else 0
    return accumulated + expanded


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _numel(layout: Layout) -> int:
    return int(torch.Size(layout.shape).numel())


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
