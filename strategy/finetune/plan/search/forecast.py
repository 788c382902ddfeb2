"""Says of a plan what a search compares: bytes, the share of recomputation, and a forecast of its tokens per second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thunder_memsave.finetune.plan.other_formats import Known
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.plan.speed import micro_batch_us, states_us, tokens_per_s
from thunder_memsave.planner.report.step_work import sustained_us

_TOKENS = 1_000_000
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
    """Part of the micro-batch's time that recomputes, the free wins included."""
    recomputes_for_budget: bool
    """Whether the budget makes it recompute, or wait for copies, or compute in tiles."""
    tokens_per_s: float
    """Of all ranks, without the optimizer's update, but with copies of states that are on the host."""

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
        known, call = Known.of_plan(made), made.call
        steps = [step for step in call.program.steps if step.op.repeat != "free"]
        again_us = sum(sustained_us(step.op, made.device) for step in steps if step.is_repeated)
        added_us = states_us(made) + (0.0 if call.plan is None else call.plan.added_us)
        return cls(
            fits=made.fits,
            peak_bytes=known.peak_bytes,
            budget_bytes=made.budget_bytes,
            constant_bytes=min(known.of(*_OF_WEIGHTS), made.smallest_bytes),
            least_bytes=made.smallest_bytes,
            recompute_share=again_us / micro_batch_us(made),
            recomputes_for_budget=added_us > 0 or call.is_tiled or call.empties_cache,
            tokens_per_s=tokens_per_s(made),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A run of the table."""

    change: str
    """As one types it; empty: the run as it is."""
    values: Mapping[str, Any]
    """Keys of the run file with their new values."""
    device: str
    num_ranks: int
    keeps_numbers: bool
    """Whether it computes the numbers of the run as it is."""
    forecast: Forecast

    def hours(self, num_tokens: int | None) -> float:
        """Return the hours for so many tokens; None: for a million."""
        return (num_tokens or _TOKENS) / self.forecast.tokens_per_s / 3600
