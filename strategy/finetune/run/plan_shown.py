"""Shows the plan that a run was compiled with, before its first update, and compares it with the measured peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric import Fabric

from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.strategy import ThunderMemsaveStrategy


class PlanShown:
    """Prints on rank 0, in the first step only; reads the metrics of `MemoryMonitor`."""

    def __init__(self) -> None:
        self._is_first = True

    def on_before_optimizer_step(self, *, fabric: Fabric) -> None:
        """Print the plan; too small a budget has ended the run before this."""
        strategy = fabric.strategy
        assert isinstance(strategy, ThunderMemsaveStrategy)
        if self._is_first and fabric.is_global_zero and strategy.plan is not None:
            print(
                f"\nthe plan, per process, when it holds the most:\n{strategy.explain(num_rows=12)}\n",
                flush=True,
            )

    def on_train_batch_end(self, *, fabric: Fabric, metrics: Mapping[str, Any]) -> None:
        """Print the measured peak."""
        predicted = metrics.get("predicted_peak_bytes")
        if self._is_first and fabric.is_global_zero and predicted is not None:
            print(_compared(predicted, metrics.get("peak_bytes")), flush=True)
        self._is_first = False


def _compared(predicted_bytes: int, measured_bytes: int | None) -> str:
    text = f"memory: predicted peak {in_units(predicted_bytes)}, "
    if measured_bytes is None:
        return f"{text}not measured, because torch counts no bytes on this device"
    more = measured_bytes / predicted_bytes - 1
    return f"{text}measured {in_units(measured_bytes)} ({more:+.1%})"
