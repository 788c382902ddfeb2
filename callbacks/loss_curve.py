"""Draws a run's training loss, validation loss and learning rate as a PNG."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from thunder_memsave.callbacks.metrics_csv import read_metrics
from thunder_memsave.checkpoints.disk_errors import told

_TRAIN, _VALIDATION, _RATE = "#2a6fbb", "#d1495b", "#6b6b6b"
_GRID = "#dddddd"

_log = logging.getLogger(__name__)


class LossCurve:
    """Draws on rank 0 at evaluations and when the training ends, also by an error.

    It draws what `MetricsCSV` has written, which must come before it, so a resumed run has the
    whole curve. The file is replaced atomically, so a viewer never sees half of it. The first disk error is a
    warning.

    Args:
        path: The PNG.
        metrics: The CSV file, with the columns `step`, `loss`, `val_loss` and `lr`; None is
            `metrics.csv` beside the PNG.
        min_seconds: Shortest time between two drawings; the last one is always made.
        clock: Returns seconds.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        metrics: str | Path | None = None,
        min_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self.metrics = self.path.with_name("metrics.csv") if metrics is None else Path(metrics)
        self.min_seconds = min_seconds
        self._clock = clock
        self._drawn_at: float | None = None
        self._has_warned = False

    def on_validation_end(self, *, fabric: Fabric) -> None:
        """Draw, unless the last drawing is too recent."""
        now = self._clock()
        if self._drawn_at is None or now - self._drawn_at >= self.min_seconds:
            self._draw(fabric)
            self._drawn_at = now

    def on_train_end(self, *, fabric: Fabric) -> None:
        """Draw the whole run."""
        self._draw(fabric)

    def on_exception(self, *, fabric: Fabric) -> None:
        """Draw what was written."""
        self._draw(fabric)

    def _draw(self, fabric: Fabric) -> None:
        if not fabric.is_global_zero:
            return
        try:
            rows = read_metrics(self.metrics)
            if _Series.of(rows, "loss").steps:
                draw_loss_curve(rows, self.path)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = "%s could not be drawn (%s); training goes on without."
                _log.warning(message, self.path.name, told(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Series:
    steps: list[int]
    values: list[float]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], name: str) -> _Series:
        """Take the rows in which the metric is a finite number."""
        all_rows = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        found = [(step, value) for step, value in all_rows if math.isfinite(value)]
        return cls(steps=[step for step, _ in found], values=[value for _, value in found])

    def smoothed(self) -> _Series:
        """Average over neighbours on both sides, so that the curve does not lag."""
        reach, count = len(self.values) // 50, len(self.values)
        sums = [0.0, *accumulate(self.values)]
        spans = ((max(at - reach, 0), min(at + reach + 1, count)) for at in range(count))
        averages = [(sums[stop] - sums[start]) / (stop - start) for start, stop in spans]
        return _Series(steps=self.steps, values=averages)


def draw_loss_curve(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw the rows of a metrics file."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _draw_losses(top, rows)
    _draw_rate(bottom, _Series.of(rows, "lr"))
    _save(figure, path)


def _draw_losses(axes: Axes, rows: Sequence[Mapping[str, str]]) -> None:
    train, validation = _Series.of(rows, "loss"), _Series.of(rows, "val_loss")
    smooth = train.smoothed()
    axes.plot(train.steps, train.values, color=_TRAIN, alpha=0.3, linewidth=1)
    label = _label("training, smoothed", smooth)
    axes.plot(smooth.steps, smooth.values, color=_TRAIN, linewidth=2, label=label)
    if validation.steps:
        label = _label("validation", validation)
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.5}
        axes.plot(validation.steps, validation.values, color=_VALIDATION, label=label, **style)
    axes.set_ylabel("loss per token")
    axes.legend(loc="upper right", framealpha=0.85, edgecolor="none")
    _tidy(axes)


def _label(name: str, series: _Series) -> str:
    return f"{name} ({series.values[-1]:.4g})"


def _draw_rate(axes: Axes, rate: _Series) -> None:
    axes.plot(rate.steps, rate.values, color=_RATE, linewidth=1.5)
    axes.set_ylabel("learning rate")
    axes.set_xlabel("optimizer step")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylim(bottom=0)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png")
    os.replace(partial, path)
