"""Adds the peak memory of a step to its metrics."""

from __future__ import annotations

import resource
import sys
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.fabric import Fabric

_GIB = 2**30


class _Plan(Protocol):
    @property
    def predicted_peak_bytes(self) -> int: ...


@runtime_checkable
class _MakesPlans(Protocol):
    """A Fabric strategy with a plan of the step's memory; None before the first step."""

    @property
    def plan(self) -> _Plan | None: ...


class MemoryMonitor:
    """Metrics of this rank's memory, depending on the device.

    On CUDA, from torch's allocator, since the row before (including an evaluation in between):

    - `peak_allocated_gib`: peak GiB of live tensors;
    - `peak_reserved_gib`: peak GiB that the allocator held, with its cache;
    - `num_alloc_retries`: times that it had to free its cache to go on, which costs time;
    - `peak_bytes`: the first of these in bytes, to compare with `predicted_peak_bytes`.

    Elsewhere `process_peak_rss_gib`: peak GiB of the whole process since it started, with
    Python and its libraries; torch does not count tensors there.

    On every device, if the strategy makes plans, `predicted_peak_bytes`: the plan's peak bytes of
    live tensors.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self._num_retries_before = 0
        self._strategy: _MakesPlans | None = None

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that this callback adds, known from `on_train_start` on."""
        planned = () if self._strategy is None else ("predicted_peak_bytes",)
        if self._device is None:
            return ("process_peak_rss_gib", *planned)
        return (
            "peak_allocated_gib",
            "peak_reserved_gib",
            "num_alloc_retries",
            "peak_bytes",
            *planned,
        )

    def on_train_start(self, *, fabric: Fabric) -> None:
        """Reset the peaks."""
        self._device = fabric.device if fabric.device.type == "cuda" else None
        strategy: object = fabric.strategy
        self._strategy = strategy if isinstance(strategy, _MakesPlans) else None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._num_retries_before = self._num_retries()

    def on_train_batch_end(self, *, metrics: dict[str, Any]) -> None:
        """Add the metrics of the step."""
        if self._strategy is not None and self._strategy.plan is not None:
            metrics["predicted_peak_bytes"] = self._strategy.plan.predicted_peak_bytes
        if self._device is None:
            metrics["process_peak_rss_gib"] = round(_peak_rss_bytes() / _GIB, 4)
            return
        allocated = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        metrics["peak_bytes"] = allocated
        metrics["peak_allocated_gib"] = round(allocated / _GIB, 4)
        metrics["peak_reserved_gib"] = round(reserved / _GIB, 4)
        metrics["num_alloc_retries"] = self._num_retries() - self._num_retries_before

    def _num_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def _peak_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
