"""Draws what `peers.py` has measured: for each setting, the bytes of a step's peak and its time, a point for each tool.

python benchmarks/peers_picture.py benchmarks/results/peers_DATE_cpu.json    # writes the .png beside it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

COLUMNS = 4
COLORS = {"Trainer": "C0", "TRL": "C1", "Lightning Fabric": "C2", "ours": "C4"}
"""By the beginning of a tool's name."""
MARKERS = {"checkpointing": "s", "torch_compile": "^"}
"""By its end; others are circles."""


def main() -> None:
    """Draw one panel for each setting."""
    path = Path(sys.argv[1])
    settings: dict[str, Any] = json.loads(path.read_text())
    num_columns = min(COLUMNS, len(settings))
    num_rows = -(-len(settings) // num_columns)
    height = 2.9 * num_rows + 1.0  # inches
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(3.6 * num_columns, height), squeeze=False
    )
    for axis, (name, tools) in zip(axes.flat, settings.items(), strict=False):
        _draw(axis, tools)
        axis.set_title(name, fontsize=10)
    for axis in list(axes.flat)[len(settings) :]:
        axis.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=9)
    figure.supxlabel("MiB of tensors at the peak of a step", y=0.65 / height, fontsize=10)
    figure.supylabel("CPU seconds of a step", fontsize=10)
    figure.tight_layout(rect=(0.01, 0.8 / height, 1, 1))
    figure.savefig(path.with_suffix(".png"), dpi=110)


def _draw(axis: Any, tools: Mapping[str, Any]) -> None:
    for tool, measured in tools.items():
        if not measured["peaks"]:
            continue
        is_budget = "budget" in tool
        axis.plot(
            max(measured["peaks"]) / 2**20,
            median(measured["steps_s"]),
            _first(MARKERS, tool, at_end=True) or "o",
            color=_first(COLORS, tool, at_end=False),
            fillstyle="none" if is_budget else "full",
            label="ours, with a budget"
            if is_budget and "0.9" in tool
            else None
            if is_budget
            else tool,
        )
    axis.set_xlim(0, 1.05 * axis.get_xlim()[1])
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)


def _first(choices: Mapping[str, str], tool: str, *, at_end: bool) -> str | None:
    for part, value in choices.items():
        if tool.endswith(part) if at_end else tool.startswith(part):
            return value
    return None


if __name__ == "__main__":
    main()
