"""Writes the metrics of every step to a CSV file, which a resumed run continues."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor

from thunder_memsave.checkpoints.disk_errors import told

_log = logging.getLogger(__name__)

_COLUMNS = (
    "step",
    "epoch",
    "loss",
    "val_loss",
    "val_perplexity",
    "lr",
    "grad_norm",
    "num_tokens",
)


class MetricsCSV:
    """Writes one row per training step and one per evaluation, on rank 0.

    A step whose numbers the host has not read yet waits for them, and so do the rows after it; the end of the run,
    also with an exception, reads what is left. The first disk error is a warning, and training goes on.

    Args:
        path: The file. Rows of steps after the one that a run starts from are dropped: a killed
            run may have written them after its last checkpoint.
        columns: Names of metrics; others are not written.
        monitors: Callbacks whose `metric_names` are further columns.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        columns: Sequence[str] = _COLUMNS,
        monitors: Iterable[object] = (),
    ) -> None:
        self.path = Path(path)
        self.columns = tuple(columns)
        self.monitors = tuple(monitors)
        self._has_warned = False
        self._is_torn = False
        self._waiting: list[tuple[int, Mapping[str, Any]]] = []

    def on_train_start(self, *, fabric: Fabric, step: int) -> None:
        """Start the file, or truncate it to the step that the run resumes from."""
        added = (name for m in self.monitors for name in getattr(m, "metric_names", ()))
        self.columns = tuple(dict.fromkeys((*self.columns, *added)))
        if fabric.is_global_zero:
            with self._warning_of_disks(step):
                rows = read_metrics(self.path) if step else []
                self._rewrite([row for row in rows if int(row["step"]) <= step])

    def on_validation_end(self, *, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the row of an evaluation."""
        self._append(fabric, step, metrics)

    def on_train_batch_end(self, *, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the row of a step."""
        self._append(fabric, step, metrics)

    def on_train_end(self) -> None:
        """Write the rows that wait."""
        self._write()

    def on_exception(self) -> None:
        """Write the rows that wait, but of steps that were not taken."""
        self._write()

    def _append(self, fabric: Fabric, step: int, metrics: Mapping[str, Any]) -> None:
        if not fabric.is_global_zero:
            return
        self._waiting.append((step, metrics))
        if not any(isinstance(v, Tensor) for _, each in self._waiting for v in each.values()):
            self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        rows = [{**_numbers(metrics), "step": step} for step, metrics in waiting if metrics]
        if not rows:
            return
        with self._warning_of_disks(waiting[0][0]):
            if not self.path.exists():
                self._rewrite([])
            elif self._is_torn:
                _cut_torn_row(self.path)
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = self._writer(file)
                for row in rows:
                    writer.writerow(row)
            self._is_torn = False

    @contextmanager
    def _warning_of_disks(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_torn = True
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "%s could not be written (%s), so rows of steps from %d on are missing in it; training goes on. "
                    "Free some space, or see that it may be written to.",
                    self.path.name,
                    told(error),
                    step,
                )

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, self.path)

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(
            file, self.columns, restval="", extrasaction="ignore", lineterminator="\n"
        )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Read what is still on the device."""
    return {k: float(v) if isinstance(v, Tensor) else v for k, v in metrics.items()}


def _cut_torn_row(path: Path) -> None:
    """Truncate the file after its last whole row, which needs no disk space."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_metrics(path: Path) -> list[dict[str, str]]:
    """Read the whole rows; the last may have been cut off by a kill."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(text[: text.rfind("\n") + 1].splitlines()))
