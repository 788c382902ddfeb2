"""Writes a plan as one self-contained HTML file: memory over the step, other budgets, and the action of each tensor."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thunder_memsave.planner.graph import Plan, Program, StepMemory
from thunder_memsave.planner.report.explain import folded, in_units, kind_name, short_source
from thunder_memsave.planner.simulate import Profile, live_bytes_by_kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 2**30
# From the bottom of the picture: memory that stays, then memory that comes and goes.
_ORDER = (
    "parameter",
    "buffer",
    "optimizer",
    "other",
    "accumulated",
    "batch",
    "gradient",
    "gathered",
    "cotangent",
    "activation",
    "temporary",
    "inside",
)
_COLORS: Mapping[str, str] = {
    "parameter": "#4c566a",
    "buffer": "#7b869d",
    "optimizer": "#8f7aa8",
    "other": "#b0a7a0",
    "accumulated": "#c08f6b",
    "batch": "#a3b18a",
    "gradient": "#d08770",
    "gathered": "#5aa9a3",
    "cotangent": "#e0b354",
    "activation": "#4f83c4",
    "temporary": "#9cc3e6",
    "inside": "#d5dbe3",
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: .2rem .7rem .2rem 0; text-align: left; }
th { border-bottom: 1px solid #999; } tr:nth-child(even) td { background: #f5f6f8; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg { width: 100%; height: auto; } .wide { overflow-x: auto; }
"""


def write_report(
    path: Path,
    *,
    plan: Plan,
    program: Program,
    profile: Profile,
    memory: StepMemory,
    title: str,
    curve: Sequence[tuple[int, float]] = (),
) -> None:
    """Write the report.

    Args:
        path: The file to write; an existing one is replaced.
        plan: The plan.
        program: The steps that run under the plan.
        profile: The program's memory.
        memory: Bytes that a step holds besides.
        title: Title of the page.
        curve: Budgets in bytes, and for each a lower bound on the recompute time in microseconds.
    """
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _facts(plan),
        "<h2>Memory over one step</h2>",
        _svg(_memory_figure(plan, program, profile, memory)),
        *(["<h2>Other budgets</h2>", _svg(_curve_figure(plan, curve))] if curve else []),
        "<h2>What happens to each tensor</h2>",
        _decisions(plan),
    ]
    path.write_text(
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n",
        encoding="utf-8",
    )


def _facts(plan: Plan) -> str:
    budget = "none" if plan.budget_bytes is None else in_units(plan.budget_bytes)
    rows = [
        ("budget", budget),
        ("predicted peak", in_units(plan.predicted_peak_bytes)),
        ("peak with all kept", in_units(plan.keep_all_peak_bytes)),
        ("kept for backward", in_units(plan.saved_bytes)),
        ("recompute time", f"{plan.recompute_us / 1000:,.2f} ms"),
        ("least possible for any plan", f"{plan.lower_bound_us / 1000:,.2f} ms"),
        ("times from", html.escape(plan.costs or "the caller")),
    ]
    cells = (f"<tr><td>{name}</td><td class='number'>{value}</td></tr>" for name, value in rows)
    return f"<table>{''.join(cells)}</table>"


def _memory_figure(plan: Plan, program: Program, profile: Profile, memory: StepMemory) -> Figure:
    """Plot each kind of memory before every step, stacked, with the operations' own allocations on top."""
    figure, axes = _figure(height=4.2)
    rows = _rows(program, profile, memory)
    steps = range(len(profile.step_peak_bytes))
    axes.stackplot(
        steps,
        [[n / _GIB for n in row] for row in rows.values()],
        labels=[kind_name(kind) for kind in rows],
        colors=[_COLORS[kind] for kind in rows],
        step="post",
        linewidth=0,
    )
    axes.axvline(program.num_forward, color="#666", linewidth=0.8, linestyle=":")
    axes.text(program.num_forward, 0, " backward", fontsize=8, color="#444", va="bottom")
    if plan.budget_bytes is not None:
        axes.axhline(plan.budget_bytes / _GIB, color="#bf3030", linewidth=1.2, label="budget")
    peak = profile.peak_bytes / _GIB
    axes.annotate(
        f"peak {in_units(profile.peak_bytes)}",
        (min(profile.peak_step, len(steps) - 1), peak),
        textcoords="offset points",
        xytext=(0, 6),
        ha="center",
        fontsize=8,
    )
    highest = max(peak, (plan.budget_bytes or 0) / _GIB)
    axes.set(xlabel="operation", ylabel="GiB", xlim=(0, len(steps)), ylim=(0, highest * 1.12))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8
    )
    return figure


def _rows(program: Program, profile: Profile, memory: StepMemory) -> dict[str, list[int]]:
    """Return bytes by kind before each step, and the step's own as `inside`; kinds that never appear are left out."""
    num_steps = len(profile.step_peak_bytes)
    rows: dict[str, list[int]] = {
        kind: list(row[:num_steps]) for kind, row in live_bytes_by_kind(program).items()
    }
    constant = {
        "optimizer": memory.optimizer_bytes,
        "other": memory.other_bytes,
        "accumulated": memory.gradient_bytes,
    }
    rows |= {kind: [nbytes] * num_steps for kind, nbytes in constant.items()}
    live = [sum(column) for column in zip(*rows.values(), strict=True)]
    during = zip(profile.step_peak_bytes, live, strict=True)
    rows["inside"] = [max(most - before, 0) for most, before in during]
    return {kind: rows[kind] for kind in _ORDER if any(rows.get(kind, ()))}


def _curve_figure(plan: Plan, curve: Sequence[tuple[int, float]]) -> Figure:
    figure, axes = _figure(height=3.0)
    axes.plot(
        [budget / _GIB for budget, _ in curve],
        [cost_us / 1000 for _, cost_us in curve],
        marker="o",
        markersize=3,
        color="#4f83c4",
        label="least possible for any plan",
    )
    axes.plot(
        plan.predicted_peak_bytes / _GIB,
        plan.recompute_us / 1000,
        marker="D",
        color="#bf3030",
        linestyle="none",
        label="this plan",
    )
    axes.set(xlabel="budget (GiB)", ylabel="recompute time (ms)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure


def _figure(*, height: float) -> tuple[Figure, Any]:
    # Not pyplot: it keeps figures alive and chooses a window system.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(11, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> str:
    """Return the figure as an SVG element for the page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    picture = text.getvalue()
    return picture[picture.index("<svg") :]


def _decisions(plan: Plan) -> str:
    head = ("action", "layers", "bytes", "cost", "module", "line", "reason")
    rows = []
    for row in folded(plan):
        texts = [
            ("", row.action),
            ("number", f"x{row.count}" if row.count > 1 else ""),
            ("number", in_units(row.nbytes)),
            ("number", f"{row.cost_us / 1000:,.2f} ms"),
            ("", row.module),
            ("", short_source(row.source)),
            ("", row.reason),
        ]
        cells = (f"<td class='{kind}'>{html.escape(text)}</td>" for kind, text in texts)
        rows.append(f"<tr>{''.join(cells)}</tr>")
    names = "".join(f"<th>{name}</th>" for name in head)
    return f"<div class='wide'><table><tr>{names}</tr>\n{chr(10).join(rows)}\n</table></div>"
