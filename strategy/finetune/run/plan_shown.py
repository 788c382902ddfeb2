"""Says in short what plan a run was compiled with, writes all of it beside the run, and compares the measured peak."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from thunder_memsave.finetune.output.run_directory import write_text
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.strategy import ThunderMemsaveStrategy

_log = logging.getLogger(__name__)


class PlanShown:
    """Prints on rank 0, in the first step only; reads the metrics of `MemoryMonitor`.

    Args:
        path: The file for the whole plan.
        prints_all: Whether to print the whole plan too, instead of three lines.
    """

    def __init__(self, path: Path, *, prints_all: bool = False) -> None:
        self._path = path
        self._prints_all = prints_all
        self._num_steps = 0

    def on_before_optimizer_step(self, *, fabric: Fabric) -> None:
        """Print the plan; too small a budget has ended the run before this."""
        strategy = fabric.strategy
        assert isinstance(strategy, ThunderMemsaveStrategy)
        if self._num_steps == 0 and fabric.is_global_zero and strategy.plan is not None:
            whole = f"the plan, per process, when it holds the most:\n{strategy.explain()}\n"
            short = "\n".join([*strategy.summary(), f"all of it: {self._path}"])
            print(f"\n{whole}" if self._prints_all else short, flush=True)
            self._write(whole)

    def _write(self, text: str) -> None:
        """Write the file; a disk that refuses it ends no run."""
        try:
            write_text(self._path, text)
        except OSError as error:
            _log.warning("the plan could not be written to %s: %s", self._path, error)

    def on_train_batch_end(self, *, fabric: Fabric, metrics: Mapping[str, Any]) -> None:
        """Print the measured peak of the second step: in the first, the optimizer has no state before its update."""
        self._num_steps += 1
        predicted, measured = metrics.get("predicted_peak_bytes"), metrics.get("peak_bytes")
        compared_after = 1 if measured is None else 2
        if self._num_steps == compared_after and fabric.is_global_zero and predicted is not None:
            print(_compared(predicted, measured), flush=True)


def _compared(predicted_bytes: int, measured_bytes: int | None) -> str:
    text = f"memory: predicted peak {in_units(predicted_bytes)}, "
    if measured_bytes is None:
        return f"{text}not measured, because torch counts no bytes on this device"
    more = measured_bytes / predicted_bytes - 1
    return f"{text}measured {in_units(measured_bytes)} ({more:+.1%})"
