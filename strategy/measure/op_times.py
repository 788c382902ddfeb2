"""Measures how long operations take on this device: times each kind on zeros, within seconds, and stores the times.

A kind is what `Op.key` tells apart: symbol, executor, shapes, strides, dtypes and numbers. The most expensive kinds by
the roofline are timed first. Kinds for which there is no time stay untimed in later runs too, so that the same plan is
found again; delete the table, `op_times-*.json` in the cache directory, to time all of them anew. Zeros are not the
numbers of a training step: a GPU may clock higher on them, and an embedding's gradient, which then accumulates all rows
into the first one, may take longer.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from thunder_memsave.measure.disk_table import DiskTable
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.run_alone import device_type_of, environment, ready_to_run
from thunder_memsave.planner.cost import roofline_us
from thunder_memsave.planner.graph import THEN, Device, TrainingGraph

_log = logging.getLogger(__name__)

_FEWEST_RUNS, _MOST_RUNS = 5, 30
_LONG_S = 0.05
"""Seconds above which one run is as good as several, and after which a short operation is run no more."""
_UNTIMED = 0.0
_CYCLES_TO_LAUNCH = 2_000_000
"""About a millisecond of a GPU, in which Python launches some hundred kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Times of the operations of one graph."""

    us: Mapping[str, float]
    """Microseconds by `Op.key`; untimed kinds have those of the roofline, scaled by its median error on timed ones."""
    num_timed: int
    num_kinds: int


class MeasuredTimes:
    """Times kinds of operations on this machine."""

    def __init__(self, *, limit_s: float = 5.0, directory: Path | None = None) -> None:
        """Open the table; nothing is timed yet.

        Args:
            limit_s: Seconds for all timing; an operation that has begun is finished.
            directory: Directory of the table; the user's cache unless given.
        """
        precision = torch.get_float32_matmul_precision()
        of = f"{environment()}, {precision} float32 products"
        self._table = DiskTable("op_times", of, directory=directory)
        self._operations: dict[str, Operation] = {}
        self._left_s = limit_s

    def remember(self, operation: Operation, found: OpProfile) -> None:
        """Store how to run an operation, in case its time is asked for."""
        if operation.can_run_alone and not found.is_view:
            self._operations[found.key] = operation

    def of(self, graph: TrainingGraph, device: Device) -> Times:
        """Time the operations of a graph; collectives have no times, as they need all ranks.

        Args:
            graph: Graph whose operations were remembered.
            device: This device, whose roofline says which kinds to time first.
        """
        ops = [op.alone or op for op in graph.ops]
        kinds = {op.key: op for op in ops if op.key and op.repeat != "free" and not op.communicates}
        counts = Counter(op.key for op in ops)
        self._time(
            sorted(kinds, key=lambda key: -counts[key] * roofline_us(kinds[key], device)),
        )
        timed = {key: us for key in kinds if (us := self._table.get(key) or _UNTIMED) > 0}
        ratios = [us / roofline_us(kinds[key], device) for key, us in timed.items()]
        factor = median(ratios) if ratios else 1.0
        scaled = {key: factor * roofline_us(op, device) for key, op in kinds.items()}
        return Times(us={**scaled, **timed}, num_timed=len(timed), num_kinds=len(kinds))

    def _time(self, keys: list[str]) -> None:
        new = [key for key in keys if self._table.get(key) is None]
        start = time.perf_counter()
        for key in new:
            self._table.put(key, self._timed(key, until=start + self._left_s))
        seconds = time.perf_counter() - start
        self._left_s = max(0.0, self._left_s - seconds)
        if new:
            _log.info("timed %d kinds of operations in %.1f s", len(new), seconds)
            self._table.save()

    def _timed(self, key: str, *, until: float) -> float:
        """Return an operation's microseconds; 0 if it cannot be timed, or the time is over."""
        if THEN in key:
            each = [self._timed(part, until=until) for part in key.split(THEN)]
            return sum(each) if all(us > 0 for us in each) else _UNTIMED
        operation = self._operations.get(key)
        if operation is None or time.perf_counter() >= until:
            return _UNTIMED
        try:
            return _least_us(operation)
        # Out of memory, or zeros are refused.
        except (RuntimeError, IndexError, ValueError) as error:
            _log.info("%s could not be timed, so the roofline estimates it: %s", key, error)
            return _UNTIMED


def _least_us(operation: Operation) -> float:
    """Return the time of the fastest of several runs: others may have waited for another process."""
    time_us = {"cpu": _cpu_us, "cuda": _cuda_us}.get(device_type_of(operation))
    if time_us is None:
        raise ValueError("it reads no tensor, or several on different devices")
    with ready_to_run(operation) as run:
        first_us = time_us(run)
        if first_us > _LONG_S * 1e6:
            return first_us
        times_us = [first_us]
        while len(times_us) < _MOST_RUNS:
            times_us.append(time_us(run))
            if len(times_us) >= _FEWEST_RUNS and sum(times_us) > _LONG_S * 1e6:
                break
        return min(times_us)


def _cpu_us(run: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1000


def _cuda_us(run: Callable[[], None]) -> float:
    """Time a run with the device's own clock.

    The device first waits, so that all launches of the run are in its queue before it begins: else it would wait for
    Python between them, and operations of a few microseconds would look as long as their launches.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES_TO_LAUNCH)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1000)
