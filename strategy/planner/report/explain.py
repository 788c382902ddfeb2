"""Shows a plan as text: its peak and recompute time, and the action for each tensor, with repeated layers folded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thunder_memsave.planner.graph import Decision, Plan
from thunder_memsave.planner.simulate import Profile

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_KINDS = {
    "parameter": "weights",
    "buffer": "buffers and constants",
    "batch": "batch",
    "gathered": "gathered weights",
    "activation": "activations",
    "cotangent": "gradients of the outputs",
    "gradient": "gradients",
    "temporary": "temporary, in backward",
    "inside": "inside the operation",
    "accumulated": "gradients of earlier micro-batches",
    "optimizer": "optimizer state",
    "other": "everything else that stays",
    "update": "optimizer's update",
    "loss": "the loss, outside of the model",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Folded:
    """Decisions that are the same in several layers."""

    action: str
    count: int
    nbytes: int
    """Bytes of all of them together."""
    cost_us: float
    """Time to recompute all of them."""
    module: str
    """Name of the module, with `*` for the number of the layer."""
    source: str
    reason: str

    @property
    def cells(self) -> list[str]:
        """The row of a table of decisions, as text."""
        return [
            self.action,
            f"x{self.count}" if self.count > 1 else "",
            in_units(self.nbytes),
            f"{self.cost_us / 1000:,.2f} ms",
            self.module,
            short_source(self.source),
            self.reason,
        ]


def folded(plan: Plan) -> list[Folded]:
    """Fold decisions that differ only in the number of the layer, the most bytes first."""
    groups: dict[tuple[str, str, str, int, str], list[Decision]] = {}
    for each in plan.decisions:
        module = _LAYER.sub("*", each.module)
        key = (plan.actions[each.name].kind, module, each.source, each.nbytes, each.reason)
        groups.setdefault(key, []).append(each)
    rows = [
        Folded(
            action=action,
            count=len(group),
            nbytes=nbytes * len(group),
            cost_us=sum(each.cost_us for each in group),
            module=module,
            source=source,
            reason=reason,
        )
        for (action, module, source, nbytes, reason), group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.nbytes, row.module, row.source))


def explain(plan: Plan, *, num_rows: int = 40) -> str:
    """Describe a plan.

    Args:
        plan: The plan.
        num_rows: Most rows of the table; the others are only counted.
    """
    return "\n".join([*_summary(plan), "", *_decisions(plan, num_rows)])


def kinds_table(profile: Profile) -> str:
    """Show the parts of the peak as a table, the most bytes first."""
    by_kind = sorted(profile.peak_bytes_by_kind.items(), key=lambda pair: -pair[1])
    rows = [[kind_name(kind), in_units(nbytes)] for kind, nbytes in by_kind if nbytes]
    return "\n".join(table([*rows, ["peak", in_units(profile.peak_bytes)]]))


def kind_name(kind: str) -> str:
    """Return the name of a kind of memory in reports."""
    return _KINDS.get(kind, kind)


def in_units(nbytes: float) -> str:
    """Format a number of bytes with its largest unit, such as `1.50 GiB`."""
    for unit, size in _UNITS:
        if abs(nbytes) >= size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,.0f} B"


def short_source(source: str) -> str:
    """Return the last two parts of a path, with the line."""
    return "/".join(source.split("/")[-2:])


def _summary(plan: Plan) -> list[str]:
    budget = "none" if plan.budget_bytes is None else in_units(plan.budget_bytes)
    rows = [
        ["budget", budget],
        ["predicted peak", in_units(plan.predicted_peak_bytes)],
        ["peak with all kept", in_units(plan.keep_all_peak_bytes)],
        ["kept for backward", in_units(plan.saved_bytes)],
        ["recompute time", f"{plan.recompute_us / 1000:,.2f} ms"],
        ["the least possible", f"{plan.lower_bound_us / 1000:,.2f} ms"],
        ["times from", plan.costs or "the caller"],
    ]
    if plan.offloaded_bytes or plan.exposed_us:
        rows.insert(4, ["copies not hidden", f"{plan.exposed_us / 1000:,.2f} ms"])
    if plan.offloaded_bytes:
        rows.insert(4, ["on the host meanwhile", in_units(plan.offloaded_bytes)])
    return table(rows)


def _decisions(plan: Plan, num_rows: int) -> list[str]:
    rows = folded(plan)
    counts: Mapping[str, int] = Counter(plan.actions[each.name].kind for each in plan.decisions)
    heading = ", ".join(f"{action} {count}" for action, count in sorted(counts.items()))
    shown = [row.cells for row in rows[:num_rows]]
    head = ["action", "", "bytes", "cost", "module", "line", "reason"]
    rest = [f"... and {len(rows) - num_rows} more rows"] if len(rows) > num_rows else []
    return [f"decisions: {heading or 'none'}", *(table([head, *shown]) if shown else []), *rest]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with the cells of each column one below the other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
