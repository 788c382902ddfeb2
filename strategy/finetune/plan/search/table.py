"""Shows the runs that a search found: as a table, and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thunder_memsave.finetune.plan.few_layers import NUM
from thunder_memsave.finetune.plan.search.asked import LeftOut
from thunder_memsave.finetune.plan.search.forecast import Row
from thunder_memsave.finetune.plan.search.search import Search
from thunder_memsave.planner.report.explain import in_units, table

_CHANGED = "*"
_ABOUT = "~"
_AS_IT_IS = "(the run as it is)"


def search_table(search: Search, *, num_tokens: int | None, price: float | None) -> str:
    """Write the table, and what its times are.

    Args:
        search: Ended, or interrupted.
        num_tokens: Of the whole run; None: not known, and hours are for a million.
        price: Of a device for an hour; None: without a column of costs.
    """
    rows = search.ranked
    plans = _number(search.num_plans, "plan")
    if search.num_estimates:
        plans = f"{_number(search.num_estimates, 'estimate')} and {plans}"
    if not rows:
        return f"no run was found that fits, in {plans}.{_nearest(search.left_out)}"
    per = "the run" if num_tokens else "1M tokens"
    head = ["", "change", "peak", "recomputed", "tokens/s", f"hours for {per}"]
    head += [] if price is None else [f"cost of {per}"]
    cells = [_cells(i, row, num_tokens, price) for i, row in enumerate(rows, start=1)]
    lines = [
        f"what to run, the fastest first, of {plans} ({len(search.left_out)} others need none or do not fit):",
        *table([head, *cells]),
        "tokens/s, hours and costs are a forecast from rates that kernels sustain, of all ranks, without the "
        "optimizer's update; no device has confirmed them.",
    ]
    if not all(row.keeps_numbers for row in rows):
        lines.append(
            f"{_CHANGED} stores weights or states in other formats, which changes the numbers; all others compute "
            "those of the run as it is."
        )
    if any(row.forecast.is_estimate for row in rows):
        lines.append(
            f"{_ABOUT}: estimated from {NUM} of the model's layers; `thunder-memsave plan` with that change is exact."
        )
    return "\n".join(lines)


def _number(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _cells(number: int, row: Row, num_tokens: int | None, price: float | None) -> list[str]:
    forecast, hours = row.forecast, row.hours(num_tokens)
    of = "" if forecast.budget_bytes is None else f" of {in_units(forecast.budget_bytes)}"
    about = _ABOUT if forecast.is_estimate else ""
    cells = [
        f"{number}{'' if row.keeps_numbers else _CHANGED}",
        row.change or _AS_IT_IS,
        f"{about}{in_units(forecast.peak_bytes)}{of}",
        f"{about}{forecast.recompute_share:.1%}",
        f"{about}{forecast.tokens_per_s:,.0f}",
        f"{about}{hours:.3g}",
    ]
    return cells if price is None else [*cells, f"{about}{_cost(row, hours, price):.3g}"]


def _cost(row: Row, hours: float, price: float) -> float:
    return hours * row.num_ranks * price


def _nearest(left_out: Sequence[LeftOut]) -> str:
    if not left_out:
        return ""
    last = left_out[-1]
    return f" The last that was tried: {last.change or _AS_IT_IS}: {last.reason}"


def search_json(search: Search, *, num_tokens: int | None, price: float | None) -> dict[str, Any]:
    """Return the runs as plain values."""
    return {
        "num_plans": search.num_plans,
        "num_estimates": search.num_estimates,
        "tokens_of_hours": num_tokens or 1_000_000,
        "rows": [_row_json(row, num_tokens, price) for row in search.ranked],
        "left_out": [{"change": each.change, "reason": each.reason} for each in search.left_out],
    }


def _row_json(row: Row, num_tokens: int | None, price: float | None) -> dict[str, Any]:
    forecast, hours = row.forecast, row.hours(num_tokens)
    return {
        "change": row.change,
        "device": row.device,
        "world_size": row.num_ranks,
        "keeps_numbers": row.keeps_numbers,
        "is_estimate": forecast.is_estimate,
        "peak_bytes": forecast.peak_bytes,
        "budget_bytes": forecast.budget_bytes,
        "recompute_share": forecast.recompute_share,
        "forecast_tokens_per_s": forecast.tokens_per_s,
        "forecast_hours": hours,
        "forecast_cost": None if price is None else _cost(row, hours, price),
    }
