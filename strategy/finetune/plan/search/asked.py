"""What a search asks of runs, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.finetune.plan.search.axes import Setting
from thunder_memsave.finetune.plan.search.forecast import Forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A run without a plan, and why."""

    change: str
    reason: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A run that is to be planned."""

    values: Mapping[str, Any]
    """Keys of the run file with their new values."""
    setting: Setting
    has_few_layers: bool = False
    """Whether an estimate from few layers is enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judges:
    """What a search asks of runs."""

    begin: Callable[[Asked], None]
    """Begins to plan a run, beside others if it can."""
    ended: Callable[[], tuple[Asked, Forecast | ThunderMemsaveError]]
    """Waits for one of the plans, and returns what there is to say of it, or why the run cannot be planned."""
    held_bytes: Callable[[Setting], int]
    """Bytes of weights and optimizer states of each rank: no plan needs less."""
    budget_bytes: Callable[[Setting], int | None]
