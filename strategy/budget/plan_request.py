"""What a plan is asked for: answered with the plans of earlier runs, else by the solver."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from thunder_memsave.budget.plan_cache import (
    cache_plan,
    cached_plan,
    plan_key,
    remember_budget,
    smaller_budgets,
)
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.search.solve import Policy, solve

SMALLEST = 1
"""Bytes, for which no plan is: asks for the smallest."""
_MOST_KNOWN = 8  # plans of earlier runs that a search begins with


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """A plan that rank 0 wants all to run."""

    plan: Plan
    is_smallest: bool = False
    """Whether no plan was found for what was asked, and this is the smallest of all."""
    bound_bytes: int | None = None
    """Of the smallest, where it was searched for: below there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """All that a plan depends on but its budget."""

    graph: TrainingGraph
    policy: Policy
    costs_us: Sequence[float]
    memory: StepMemory
    pinned: Actions
    generator_state_bytes: int
    costs: str
    """Where `costs_us` come from."""
    narrowed: Question | None = None
    """With fewer choices, among which the smallest plan is sooner found; asked where no plan is found with all."""

    def answer(
        self,
        target_bytes: int | None,
        *,
        budget_bytes: int | None,
        too_large: Collection[Actions] = (),
    ) -> Offer:
        """A plan within `target_bytes`, else the smallest that was found, by earlier runs too.

        Args:
            target_bytes: The budget, less what runs has needed beyond what was planned; None: no limit.
            budget_bytes: What is asked for.
            too_large: Those of plans that did not fit, though they had fitted an earlier run.
        """
        if target_bytes is None or budget_bytes is None:
            return Offer(plan=replace(self.solved(None), costs=self.costs))
        is_corrected = target_bytes != budget_bytes
        offer = self._known(target_bytes, is_corrected) or self._searched(target_bytes)
        if target_bytes != SMALLEST:
            offer = self._or_one_that_ran(offer, budget_bytes, too_large)
        plan = replace(offer.plan, budget_bytes=budget_bytes, costs=self.costs)
        return replace(offer, plan=plan)

    def remember_run(self, plan: Plan, *, peak_bytes: int) -> None:
        """Note what a plan needed when it ran, on the rank that needed the most."""
        cache_plan(self._run_key(peak_bytes), replace(plan, predicted_peak_bytes=peak_bytes))
        remember_budget(self._run_key(None), peak_bytes)

    def is_tight(self, target_bytes: int | None) -> bool:
        """Whether more than the free wins is needed, so that costs matter."""
        if target_bytes is None or self.policy != "plan":
            return False
        free = replace(self, policy="keep_all").solved(None)
        return free.predicted_peak_bytes > target_bytes

    def _known(self, target_bytes: int, is_corrected: bool) -> Offer | None:
        """A target that is less than the budget is not searched for below the smallest plan of earlier runs."""
        if target_bytes == SMALLEST:
            return None
        if (plan := cached_plan(self._key(target_bytes))) is not None:
            return Offer(plan=plan)
        smallest = cached_plan(self._key(SMALLEST)) if is_corrected else None
        if smallest is None or target_bytes >= smallest.predicted_peak_bytes:
            return None
        return Offer(plan=smallest, is_smallest=True)

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
        """A plan that is no slower and ran within the budget: a corrected target may be below what it was made for."""
        peaks = smaller_budgets(self._run_key(None), budget_bytes)[:_MOST_KNOWN]
        ran = [plan for peak in peaks if (plan := cached_plan(self._run_key(peak))) is not None]
        ran = [plan for plan in ran if plan.actions not in too_large]
        if not ran:
            return offer
        plan = min(ran, key=lambda p: p.recompute_us)
        if not offer.is_smallest and offer.plan.recompute_us <= plan.recompute_us:
            return offer
        # What was proven was proven for smaller budgets.
        return Offer(plan=replace(plan, lower_bound_us=0.0, layered_bound_us=0.0))

    def _plans_within(self, target_bytes: int) -> list[Plan]:
        """Plans of earlier runs for no larger budgets, so that time does not rise with the budget."""
        budgets = smaller_budgets(self._key(None), target_bytes)
        keys = [self._key(b) for b in budgets[:_MOST_KNOWN]] + [self._key(SMALLEST)]
        return [plan for key in keys if (plan := cached_plan(key)) is not None]

    def _narrowed(self, target_bytes: int, smallest: Offer) -> Offer:
        if self.narrowed is None:
            return smallest
        offer = self.narrowed._known(target_bytes, is_corrected=False)
        offer = offer or self.narrowed._searched(target_bytes)
        if offer.is_smallest:
            # Below what it calls the bound there may be plans with other choices.
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
        return Offer(plan=found, is_smallest=True, bound_bytes=bound_bytes)

    def _run_key(self, peak_bytes: int | None) -> str:
        return f"{self._key(peak_bytes)}-run"

    def _key(self, target_bytes: int | None) -> str:
        return plan_key(
            self.graph,
            budget_bytes=target_bytes,
            costs_us=self.costs_us,
            memory=self.memory,
            pinned=self.pinned,
        )

    def solved(
        self, target_bytes: int | None, *, known: Sequence[Plan] = (), **limits: float
    ) -> Plan:
        """What `solve` says, whatever earlier runs have found; `limits` are its own."""
        return solve(
            self.graph,
            policy=self.policy,
            budget_bytes=target_bytes,
            costs_us=self.costs_us,
            memory=self.memory,
            pinned=self.pinned,
            known=known,
            generator_state_bytes=self.generator_state_bytes,
            **limits,
        )
