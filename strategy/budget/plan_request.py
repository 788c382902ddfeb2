"""Answers requests for plans: with the plans of earlier runs, else with the solver."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from thunder_memsave.budget.plan_cache import (
    cache_plan,
    cached_plan,
    known_bound,
    plan_key,
    remember_bound,
    remember_budget,
    smaller_budgets,
)
from thunder_memsave.distributed.agreement import OtherRankError, is_rank_zero, together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.search.mixes import OffloadTerms, solve_mix
from thunder_memsave.planner.search.solve import Policy, solve

SMALLEST = 1
"""Target in bytes that no plan meets: asks for the smallest plan."""
_MOST_KNOWN = 8  # plans of earlier runs that a search begins with


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A plan that rank 0 offers to all ranks."""

    plan: Plan
    is_smallest: bool = False
    """True if no plan was found for the target, and this is the smallest of all."""
    bound_bytes: int | None = None
    """Lower bound on the peak bytes of all plans, if the smallest plan was searched for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The inputs of a plan, except its budget."""

    graph: TrainingGraph
    policy: Policy
    costs_us: Sequence[float]
    memory: StepMemory
    pinned: Actions
    generator_state_bytes: int
    costs: str
    """Source of `costs_us`, in words."""
    reuses_runs: bool = True
    """Whether plans are offered whose tensors fitted in earlier runs; False where more than tensors has to fit."""
    narrowed: Question | None = None
    """The same with fewer choices, for which the smallest plan is found sooner; asked if all choices find no plan."""
    offload: OffloadTerms | None = None
    """On which plans may copy values to the host; None: they do not."""
    time_limit_s: float | None = None
    """Work for a plan; None: as much as `solve` does by itself."""
    spare_bytes: int = 0
    """As of `solve`: bytes that are not filled with what is cheap to recompute."""

    def answer(
        self,
        target_bytes: int | None,
        *,
        budget_bytes: int | None,
        too_large: Collection[Actions] = (),
    ) -> Offer:
        """Find a plan within `target_bytes`, else the smallest that was found, also by earlier runs.

        Args:
            target_bytes: The budget, less the bytes by which the traces that run exceed the plan; None: no limit.
            budget_bytes: The budget that was asked for.
            too_large: Actions of plans that did not fit this time.
        """
        if target_bytes is None or budget_bytes is None:
            return Offer(plan=replace(self.solved(None), costs=self.costs))
        is_corrected = target_bytes != budget_bytes
        offer = self._known(target_bytes, is_corrected) or self._searched(target_bytes)
        if target_bytes != SMALLEST and self.reuses_runs:
            offer = self._or_one_that_ran(offer, budget_bytes, too_large)
        plan = replace(offer.plan, budget_bytes=budget_bytes, costs=self.costs)
        return replace(offer, plan=plan)

    def remember_run(self, plan: Plan, *, peak_bytes: int) -> None:
        """Record the peak of a plan's final traces, on the rank with the largest."""
        cache_plan(self._run_key(peak_bytes), replace(plan, predicted_peak_bytes=peak_bytes))
        remember_budget(self._run_key(None), peak_bytes)

    def smallest_bytes(self, *, time_limit_s: float) -> int:
        """Search for the smallest peak of any plan."""
        limits: dict[str, Any] = {"time_limit_s": time_limit_s}
        if self.offload is None:
            limits["bounds_smallest"] = False
        try:
            found = replace(self, policy="plan").solved(SMALLEST, **limits)
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            return error.smallest_bytes
        return found.predicted_peak_bytes

    def is_tight(self, target_bytes: int | None) -> bool:
        """Tell whether keeping all exceeds the target, so that costs matter."""
        if target_bytes is None or self.policy != "plan":
            return False
        all_kept = replace(self, policy="keep_all").solved(None)
        return all_kept.predicted_peak_bytes > target_bytes

    def _known(self, target_bytes: int, is_corrected: bool) -> Offer | None:
        """Return a cached plan; the smallest for a target below all plans, or for a corrected one below that."""
        if target_bytes == SMALLEST:
            return None
        if (plan := cached_plan(self._key(target_bytes))) is not None:
            return Offer(plan=plan)
        bound_bytes = None if is_corrected else known_bound(self._key(None))
        if bound_bytes is not None and target_bytes >= bound_bytes:
            return None
        smallest = cached_plan(self._key(SMALLEST))
        if smallest is None or target_bytes >= smallest.predicted_peak_bytes:
            return None
        if is_corrected:
            return Offer(plan=smallest, is_smallest=True)
        offer = Offer(plan=smallest, is_smallest=True, bound_bytes=bound_bytes)
        return self._narrowed(target_bytes, offer)

    def _searched(self, target_bytes: int) -> Offer:
        try:
            plan = self.solved(target_bytes, known=self._plans_within(target_bytes))
        except BudgetError as error:
            return self._narrowed(target_bytes, self._smallest(error))
        cache_plan(self._key(target_bytes), plan)
        remember_budget(self._key(None), target_bytes)
        return Offer(plan=plan)

    def _or_one_that_ran(
        self, offer: Offer, budget_bytes: int, too_large: Collection[Actions]
    ) -> Offer:
        """Prefer a plan that ran within the budget and is no slower: it may need more than a corrected target."""
        peaks = smaller_budgets(self._run_key(None), budget_bytes)[:_MOST_KNOWN]
        ran = [plan for peak in peaks if (plan := cached_plan(self._run_key(peak))) is not None]
        ran = [plan for plan in ran if plan.actions not in too_large]
        if not ran:
            return offer
        plan = min(ran, key=lambda p: p.added_us)
        if not offer.is_smallest and offer.plan.added_us <= plan.added_us:
            return offer
        # Its bounds were proven for a smaller budget, and need not hold for this one.
        return Offer(plan=replace(plan, lower_bound_us=0.0))

    def _plans_within(self, target_bytes: int) -> list[Plan]:
        """Return plans of earlier runs for budgets up to this one, so that time does not rise with the budget."""
        budgets = smaller_budgets(self._key(None), target_bytes)
        keys = [self._key(b) for b in budgets[:_MOST_KNOWN]] + [self._key(SMALLEST)]
        return [plan for key in keys if (plan := cached_plan(key)) is not None]

    def _narrowed(self, target_bytes: int, smallest: Offer) -> Offer:
        if self.narrowed is None:
            return smallest
        offer = self.narrowed._known(target_bytes, is_corrected=False)
        offer = offer or self.narrowed._searched(target_bytes)
        if offer.is_smallest:
            # Its bound holds for fewer choices only: other plans may be below it.
            offer = replace(offer, bound_bytes=smallest.bound_bytes)
            return min(offer, smallest, key=lambda o: o.plan.predicted_peak_bytes)
        return offer

    def _smallest(self, error: BudgetError) -> Offer:
        found, bound_bytes = error.smallest_plan, error.bound_bytes
        if found is None or bound_bytes is None:
            raise error
        known = cached_plan(self._key(SMALLEST))
        if known is not None and known.predicted_peak_bytes <= found.predicted_peak_bytes:
            found = known
        else:
            cache_plan(self._key(SMALLEST), found)
        remember_bound(self._key(None), bound_bytes)
        return Offer(plan=found, is_smallest=True, bound_bytes=bound_bytes)

    def _run_key(self, peak_bytes: int | None) -> str:
        return f"{self._key(peak_bytes)}-run"

    def _key(self, target_bytes: int | None) -> str:
        key = plan_key(
            self.graph,
            budget_bytes=target_bytes,
            costs_us=self.costs_us,
            memory=self.memory,
            pinned=self.pinned,
            terms=self.offload,
        )
        return f"{key}-spare{self.spare_bytes}" if self.spare_bytes else key

    def solved(
        self, target_bytes: int | None, *, known: Sequence[Plan] = (), **limits: Any
    ) -> Plan:
        """Call the solver, without looking for plans of earlier runs; `limits` are passed on."""
        if self.time_limit_s is not None:
            limits = {"time_limit_s": self.time_limit_s, **limits}
        search = solve if self.offload is None else partial(solve_mix, terms=self.offload)
        return search(
            self.graph,
            policy=self.policy,
            budget_bytes=target_bytes,
            costs_us=self.costs_us,
            memory=self.memory,
            pinned=self.pinned,
            known=known,
            generator_state_bytes=self.generator_state_bytes,
            spare_bytes=self.spare_bytes,
            **limits,
        )


def refuse_budget(
    offer: Offer, *, budget_bytes: int, more_bytes: int, data_parallel: DataParallel | None
) -> NoReturn:
    """Raise an error that names the smallest plan's budget: with that budget, this plan is found again. A collective.

    Args:
        offer: The smallest plan, with a bound.
        budget_bytes: What was asked for.
        more_bytes: Bytes by which the plan exceeds it.
        data_parallel: The ranks, of which rank 0 says why.

    Raises:
        BudgetError: on rank 0.
        OtherRankError: on all others.
    """
    assert offer.bound_bytes is not None
    error = BudgetError.no_plan(
        budget_bytes=budget_bytes,
        smallest_bytes=(smallest_bytes := budget_bytes + more_bytes),
        bound_bytes=min(offer.bound_bytes, smallest_bytes),
        smallest_plan=offer.plan,
        of="this call",
    )

    def say() -> None:
        if is_rank_zero(data_parallel):
            raise error

    together(say, data_parallel, error_elsewhere=OtherRankError)
    raise AssertionError("rank 0 raises, and so do all")
