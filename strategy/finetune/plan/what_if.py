"""Answers `plan --what-if`: plans the run with one thing changed at a time, and shows what each needs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.finetune.plan.other_formats import with_values
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.plan.search.axes import (
    lengths,
    micro_batch_sizes,
    settings_of,
    values_with_rows,
)
from thunder_memsave.finetune.plan.search.forecast import Forecast
from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.graph import Device
from thunder_memsave.planner.report.explain import in_units, table
from thunder_memsave.settings.problems import ConfigError

HEAD = ("what if", "needs", "recomputed", "tokens/s")
_AS_IT_IS = "(the run as it is)"


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """A run with one thing changed."""

    change: str
    """As one types it; empty: the run as it is."""
    forecast: Forecast | None
    """None: it cannot be planned."""
    reason: str = ""
    """Why not."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, under `HEAD`."""
        change, made = self.change or _AS_IT_IS, self.forecast
        if made is None:
            return (change, self.reason, "", "")
        of = "" if made.budget_bytes is None else f" of {in_units(made.budget_bytes)}"
        needs = f"{in_units(made.peak_bytes)}{of}"
        if not made.fits:
            return (change, f"{needs}: does not fit", "", "")
        return (change, needs, f"{made.recompute_share:.1%}", f"{made.tokens_per_s:,.0f}")

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        made = self.forecast
        if made is None:
            return {"change": self.change, "reason": self.reason}
        return {
            "change": self.change,
            "fits": made.fits,
            "peak_bytes": made.peak_bytes,
            "budget_bytes": made.budget_bytes,
            "recompute_share": made.recompute_share,
            "forecast_tokens_per_s": made.tokens_per_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """What is to be planned."""

    shown: str
    device: Device
    num_ranks: int
    values: Mapping[str, Any] = field(default_factory=dict)


def what_if(
    config: RunConfig,
    made: RunPlan,
    plan: Callable[[RunConfig, Device, int], RunPlan],
    *,
    say: Callable[[str], None],
) -> list[WhatIf]:
    """Plan half and twice the ranks, the rows at once and their length, and the devices with more and less memory.

    Rows of an optimizer step stay as many as they are.

    Args:
        config: The run.
        made: Its plan, which becomes the first row.
        plan: `(run, device, number of ranks) -> plan`.
        say: Shows a line while it goes on.
    """
    found = [WhatIf(change="", forecast=Forecast.of_plan(made))]
    for change in _changes(config, made.device, made.num_ranks):
        say(f"what if {change.shown}")
        gc.collect()  # the traces of the plan before: Python's collector is off
        try:
            other = plan(with_values(config, change.values), change.device, change.num_ranks)
        except ThunderMemsaveError as error:
            found.append(WhatIf(change=change.shown, forecast=None, reason=str(error)))
        else:
            found.append(WhatIf(change=change.shown, forecast=Forecast.of_plan(other)))
    return found


def what_if_table(rows: Sequence[WhatIf]) -> str:
    """Write the table, and what its times are."""
    lines = table([list(HEAD), *(list(row.cells) for row in rows)])
    note = (
        "tokens/s are a forecast, of all ranks, without the optimizer's update; the rows of an optimizer step stay as "
        "many as they are."
    )
    return "\n".join([*lines, note])


def _changes(config: RunConfig, device: Device, num_ranks: int) -> Iterator[_Change]:
    in_all = batch_sizes(config.train, world_size=num_ranks).global_batch_size
    for ranks in (num_ranks // 2, num_ranks * 2):
        if ranks and (values := _with_ranks(config, device, ranks, in_all)) is not None:
            yield _Change(
                shown=f"--world-size={ranks}", device=device, num_ranks=ranks, values=values
            )
    for other in _next_devices(device):
        yield _Change(shown=f"--device={other.name}", device=other, num_ranks=num_ranks)
    for values in (*_rows(config, device, num_ranks, in_all), *lengths(config)):
        shown = " ".join(f"--{key}={value}" for key, value in values.items())
        yield _Change(shown=shown, device=device, num_ranks=num_ranks, values=values)


def _with_ranks(
    config: RunConfig, device: Device, num_ranks: int, in_all: int
) -> Mapping[str, Any] | None:
    """Return what other ranks change of the batch; None: they do not divide it."""
    try:
        (own,) = micro_batch_sizes(config, axes=(), num_ranks=num_ranks, in_all=in_all)
    except ConfigError:
        return None
    (setting,) = settings_of(config, axes=(), num_ranks=[num_ranks], devices=[device])
    return values_with_rows(config, setting, num_rows=own, in_all=in_all)


def _next_devices(device: Device) -> Iterator[Device]:
    """Yield the devices of the table with the next less memory, and the next more."""
    own = device.memory_bytes
    if own is None:
        return
    others = [d for d in DEVICES.values() if d.memory_bytes not in (None, own)]
    for is_next in (False, True):
        side = [d for d in others if ((d.memory_bytes or 0) > own) == is_next]
        if side:
            yield min(side, key=lambda d: abs((d.memory_bytes or 0) - own))


def _rows(
    config: RunConfig, device: Device, num_ranks: int, in_all: int
) -> Iterator[Mapping[str, Any]]:
    """Yield fewer rows at once, and more."""
    own = config.train.micro_batch_size or 1
    sizes = micro_batch_sizes(
        config, axes=("micro_batch_size",), num_ranks=num_ranks, in_all=in_all
    )
    (setting,) = settings_of(config, axes=(), num_ranks=[num_ranks], devices=[device])
    fewer, more = [n for n in sizes if n < own], [n for n in sizes if n > own]
    for num_rows in (*fewer[-1:], *more[:1]):
        yield values_with_rows(config, setting, num_rows=num_rows, in_all=in_all)
