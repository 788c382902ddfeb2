"""Writes a plan as one self-contained HTML file: a verdict, memory over the step, other budgets, the decisions."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from thunder_memsave.planner.graph import Plan, Program, StepMemory
from thunder_memsave.planner.report.explain import folded, in_units
from thunder_memsave.planner.report.summary import plan_summary
from thunder_memsave.planner.report.timeline import timeline
from thunder_memsave.planner.simulate import Profile

_ASSETS = Path(__file__).parent / "assets"
_MOST_ROWS = 300
"""Rows of the table of decisions: those with the most bytes; the others are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A forecast of a run's speed, before a device has confirmed it."""

    micro_batch_ms: float
    """Forward and backward of one micro-batch at the rates that kernels sustain, one after the other."""
    tokens: int
    """Tokens of one micro-batch over all ranks, padding included."""
    num_devices: int
    device: str

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.tokens / (self.micro_batch_ms / 1000)


def write_report(
    path: Path,
    *,
    plan: Plan,
    program: Program,
    profile: Profile,
    memory: StepMemory,
    title: str,
    curve: Sequence[tuple[int, float]] = (),
    speed: Speed | None = None,
    others: Sequence[Sequence[str]] = (),
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the report, which loads nothing, and stays below 300 kB whatever the number of operations.

    Args:
        path: The file to write; an existing one is replaced.
        plan: The plan.
        program: The steps that run under the plan.
        profile: The program's memory.
        memory: Bytes that a step holds besides.
        title: Title of the page.
        curve: Budgets in bytes, and for each a lower bound on the recompute time in microseconds.
        speed: The forecast of the speed; None: the page has none.
        others: Table of runs with one thing changed, its head first; empty: the page has none.
        facts: More rows of the first table, by name.
    """
    data = {"budget": plan.budget_bytes, **asdict(timeline(program, profile, memory))}
    if speed is not None:
        data["speed"] = {"tokensPerS": speed.tokens_per_s, "devices": speed.num_devices}
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _verdict(plan, profile),
        '<h2>Memory over one step</h2><div id="chart"><canvas></canvas><div id="bands"></div></div>'
        '<p id="under" aria-live="polite">Point at the picture, or touch it, to see what each byte is.</p>',
        "" if speed is None else _speed(speed),
        f"<h2>What if</h2>{_table(others[0], others[1:])}" if others else "",
        _budgets(plan, curve),
        f"<h2>The plan</h2>{_facts(plan, facts or {})}",
        f"<h2>What happens to each tensor</h2>{_decisions(plan)}",
    ]
    style, script = (
        (_ASSETS / name).read_text(encoding="utf-8") for name in ("plan.css", "plan.js")
    )
    values = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>const DATA={values};\n{script}</script>\n</body></html>\n",
        encoding="utf-8",
    )


def _verdict(plan: Plan, profile: Profile) -> str:
    first, *others = plan_summary(plan, profile)
    is_over = plan.budget_bytes is not None and profile.peak_bytes > plan.budget_bytes
    lines = "".join(f"<br>{html.escape(line)}" for line in others)
    return f"<p class='verdict{' over' if is_over else ''}'><b>{html.escape(first)}</b>{lines}</p>"


def _speed(speed: Speed) -> str:
    noun = "device" if speed.num_devices == 1 else "devices"
    return (
        f"<h2>Speed and cost, a forecast</h2><p>{speed.micro_batch_ms:,.1f} ms for forward and backward of a "
        f"micro-batch, so about {speed.tokens_per_s:,.0f} tokens/s on {speed.num_devices} {noun} of "
        f"{html.escape(speed.device)}. No device has confirmed it: kernels run at the rates that they usually sustain, "
        "one after the other, without the optimizer's update.</p><p><label>price of a GPU hour "
        "<input id='price' type='number' value='2.50' step='0.1' min='0'></label> <label>million tokens in an epoch "
        "<input id='tokens' type='number' value='100' min='0'></label> <output id='cost'></output></p>"
    )


def _budgets(plan: Plan, curve: Sequence[tuple[int, float]]) -> str:
    """Tell the least recompute time of other budgets."""
    if not curve:
        return ""
    rows = [("budget", "at least recomputed for it")]
    rows += [(in_units(nbytes), f"{us / 1000:,.2f} ms") for nbytes, us in sorted(curve)]
    head = f"this plan: {in_units(plan.predicted_peak_bytes)}, {plan.recompute_us / 1000:,.2f} ms"
    return f"<h2>Other budgets</h2><p>{head}</p>{_table(rows[0], rows[1:])}"


def _facts(plan: Plan, more: Mapping[str, str]) -> str:
    budget = "none" if plan.budget_bytes is None else in_units(plan.budget_bytes)
    rows = [
        ("budget", budget),
        ("predicted peak", in_units(plan.predicted_peak_bytes)),
        ("peak with all kept", in_units(plan.keep_all_peak_bytes)),
        ("kept for backward", in_units(plan.saved_bytes)),
        ("recompute time", f"{plan.recompute_us / 1000:,.2f} ms"),
        ("the least possible", f"{plan.lower_bound_us / 1000:,.2f} ms"),
        ("times from", plan.costs or "the caller"),
        *more.items(),
    ]
    return _table(("", ""), rows)


def _decisions(plan: Plan) -> str:
    rows = folded(plan)
    texts = [row.cells for row in rows[:_MOST_ROWS]]
    more = f"<p>... and {len(rows) - _MOST_ROWS} more rows</p>" if len(rows) > _MOST_ROWS else ""
    head = ("action", "layers", "bytes", "time to recompute", "module", "line", "reason")
    return _table(head, texts) + more


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    top = f"<tr>{names}</tr>" if any(head) else ""
    return f"<div class='wide'><table>{top}\n{body}\n</table></div>"
