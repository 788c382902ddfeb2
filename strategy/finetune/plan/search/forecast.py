"""Says of a plan what a search compares: bytes, the share of recomputation, and a forecast of its tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thunder_memsave.finetune.plan.few_layers import FewLayers
from thunder_memsave.finetune.plan.other_formats import Known
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.plan.search.axes import Setting
from thunder_memsave.finetune.plan.speed import (
    again_us,
    micro_batch_us,
    states_us,
    tokens_of,
    tokens_per_s,
    waits_us,
)

_TOKENS = 1_000_000
_MAY_FIT = 1.1
"""A run may fit whose estimated bytes exceed a budget by less: a plan of all layers will tell."""
_OF_WEIGHTS = ("parameter", "buffer", "gathered", "gradient", "accumulated", "optimizer", "other")


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What a plan says of a run. Times are forecasts: no device has confirmed them."""

    fits: bool
    peak_bytes: int
    """What it needs of the budget."""
    budget_bytes: int | None
    constant_bytes: int
    """What of the least bytes is weights and what belongs to them: with more rows it stays."""
    least_bytes: int
    """The smallest budget with which it fits, of tensors."""
    recompute_share: float
    """Part of the micro-batch's time that recomputes."""
    recomputes_for_budget: bool
    """Whether the budget makes it recompute, or wait for copies, or compute in tiles."""
    tokens_per_s: float
    """Of all ranks, without the optimizer's update, but with copies of states that are on the host."""
    is_estimate: bool = False
    """Whether it is of a plan of few layers, in proportion."""

    @property
    def next_bytes(self) -> int:
        """Estimated least bytes with twice the rows."""
        return self.constant_bytes + 2 * self.working_bytes

    @property
    def working_bytes(self) -> int:
        """What of the least bytes grows with the rows."""
        return self.least_bytes - self.constant_bytes

    @classmethod
    def of_plan(cls, made: RunPlan) -> Forecast:
        """Return what there is to say of a plan."""
        if made.few_layers is not None:
            return cls._of_few(made, made.few_layers)
        known = Known.of_plan(made)
        return cls(
            fits=made.fits,
            peak_bytes=known.peak_bytes,
            budget_bytes=made.budget_bytes,
            constant_bytes=min(known.of(*_OF_WEIGHTS), made.smallest_bytes),
            least_bytes=made.smallest_bytes,
            recompute_share=again_us(made) / micro_batch_us(made),
            recomputes_for_budget=_adds_time(made),
            tokens_per_s=tokens_per_s(made),
        )

    @classmethod
    def _of_few(cls, made: RunPlan, few: FewLayers) -> Forecast:
        known, program = Known.of_plan(made), made.call.program
        once_us = few.computing_us(program, made.device)
        us = once_us + few.times_as_many * (again_us(made) + waits_us(made))
        least_bytes, budget_bytes = few.of_all(made.smallest_bytes), made.budget_bytes
        fits = budget_bytes is None or least_bytes <= _MAY_FIT * budget_bytes
        as_run = few.knowing(made.call.profile, program.num_forward)
        peak_bytes = as_run.of_all(known.peak_bytes) if fits else least_bytes
        return cls(
            fits=fits,
            peak_bytes=min(peak_bytes, budget_bytes or peak_bytes) if fits else peak_bytes,
            budget_bytes=budget_bytes,
            constant_bytes=min(as_run.of_all(known.of(*_OF_WEIGHTS)), least_bytes),
            least_bytes=least_bytes,
            recompute_share=few.times_as_many * again_us(made) / us,
            recomputes_for_budget=_adds_time(made),
            tokens_per_s=tokens_of(made) / us * 1e6,
            is_estimate=True,
        )


def _adds_time(made: RunPlan) -> bool:
    call = made.call
    added_us = states_us(made) + (0.0 if call.plan is None else call.plan.added_us)
    return added_us > 0 or call.is_tiled or call.empties_cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A run of the table."""

    change: str
    """As one types it; empty: the run as it is."""
    values: Mapping[str, Any]
    """Keys of the run file with their new values."""
    setting: Setting
    forecast: Forecast

    @property
    def device(self) -> str:
        """Name of the device."""
        return self.setting.device.name

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.setting.num_ranks

    @property
    def keeps_numbers(self) -> bool:
        """Whether it computes the numbers of the run as it is."""
        return self.setting.keeps_numbers

    def hours(self, num_tokens: int | None) -> float:
        """Return the hours for so many tokens; None: for a million."""
        return (num_tokens or _TOKENS) / self.forecast.tokens_per_s / 3600
