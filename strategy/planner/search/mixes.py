"""Solves for a plan that may also offload: the least time added to a step by recomputing and by waiting for copies.

Where keeping all fits, nothing else is searched. Else `offload/choose.py` proposes values for the host, the search
finds a plan for the rest with each proposal, and each plan is timed with its copies placed within the budget. Plans
without offload are searched too, unless a bound proves that they are all slower. The fastest is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

from thunder_memsave.errors import BudgetError
from thunder_memsave.planner import effort
from thunder_memsave.planner.actions import NO_ACTIONS, OFFLOAD, Actions
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.linear.bounds import least_bytes, least_us
from thunder_memsave.planner.offload.choose import HALF, WHOLE, Choice, targets
from thunder_memsave.planner.offload.copies import LEAST_BYTES, is_copy, with_copies
from thunder_memsave.planner.offload.engines import CopyRates, StepTime, step_time
from thunder_memsave.planner.offload.place import place, placed
from thunder_memsave.planner.order import CPU_GENERATOR_STATE_BYTES, order
from thunder_memsave.planner.search.problem import problem_of
from thunder_memsave.planner.search.solve import SEARCHES, Policy, solve
from thunder_memsave.planner.simulate import simulate

_NOTHING_ELSE = StepMemory()
FEW_CANDIDATES = 5
"""Most values that could be offloaded of which every set is tried."""
MOST_PROPOSALS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadTerms:
    """The terms on which plans may copy values to the host."""

    rates: CopyRates
    host_bytes: int
    """Most bytes of the host for one call."""
    least_bytes: int = LEAST_BYTES
    """Smaller values stay on the device."""
    is_last_resort: bool = False
    """Whether it is known that no plan without copies fits."""


def solve_mix(
    graph: TrainingGraph,
    *,
    budget_bytes: int | None,
    costs_us: Sequence[float],
    terms: OffloadTerms,
    memory: StepMemory = _NOTHING_ELSE,
    policy: Policy = "plan",
    pinned: Actions = NO_ACTIONS,
    known: Sequence[Plan] = (),
    generator_state_bytes: int = CPU_GENERATOR_STATE_BYTES,
    time_limit_s: float = effort.TIME_LIMIT_S,
    spare_bytes: int = 0,
) -> Plan:
    """Choose an action for each storage that backward needs, `offload` among them.

    Args:
        graph: As for `solve`, and so are the others but two.
        budget_bytes: The largest peak of a step on the device.
        costs_us: Microseconds of each operation, forward's and backward's.
        terms: Bandwidth and memory of the host.
        memory: Bytes that a step holds besides.
        policy: Others than `plan` offload nothing.
        pinned: Is not offloaded either.
        known: Other plans for this graph.
        generator_state_bytes: Bytes kept for each random operation that backward recomputes.
        time_limit_s: Work for all plans that offload together, and again for those without.
        spare_bytes: As for `solve`; plans that offload may take all.

    Raises:
        BudgetError: no plan was found, with or without offload; its bound is of both.
    """
    found = _Mixes(
        graph=graph,
        budget_bytes=budget_bytes or 0,
        costs_us=costs_us,
        terms=terms,
        memory=memory,
        pinned=pinned,
        generator_state_bytes=generator_state_bytes,
        time_limit_s=time_limit_s,
    )
    if budget_bytes is None or policy != "plan" or found.fits_with_all:
        return found.solved(budget_bytes, policy=policy, spare_bytes=spare_bytes)
    fitting = (p for p in known if p.predicted_peak_bytes <= budget_bytes)
    found.known = [p for p in fitting if p.actions.offloaded]
    for away in found.proposals():
        found.add(away)
    if found.may_be_worse_than_alone:
        found.add_alone([p for p in known if not p.actions.offloaded])
    return found.best()


def timed(
    plan: Plan,
    graph: TrainingGraph,
    costs_us: Sequence[float],
    memory: StepMemory,
    terms: OffloadTerms,
    generator_state_bytes: int,
) -> StepTime:
    """Return the time of a step under a plan, with its copies beside what computes, within the plan's budget."""
    away = [n for n, s in enumerate(graph.storages) if s.name in plan.actions.offloaded]
    program = order(graph, plan.actions, generator_state_bytes=generator_state_bytes)
    program = with_copies(program, away)
    cost_of = {op.index: us for op, us in zip(graph.ops, costs_us, strict=True)}

    def costs() -> list[float]:
        return [0.0 if is_copy(s.op) else cost_of[s.op.index] for s in program.steps]

    where = place(
        program,
        costs(),
        simulate(program, memory).step_peak_bytes,
        target_bytes=plan.copies_within_bytes,
        rates=terms.rates,
    )
    program = placed(program, where)
    return step_time(program, costs(), terms.rates)


@dataclass(kw_only=True)
class _Mixes:
    """The plans found so far, and what they are made of."""

    graph: TrainingGraph
    budget_bytes: int
    costs_us: Sequence[float]
    terms: OffloadTerms
    memory: StepMemory
    pinned: Actions
    generator_state_bytes: int
    time_limit_s: float
    plans: list[Plan] = field(default_factory=list)
    """Those that fit."""
    known: Sequence[Plan] = ()
    """Plans of earlier searches that offload and fit."""
    errors: list[BudgetError] = field(default_factory=list)
    """Of searches without one."""

    def __post_init__(self) -> None:
        self._problem = problem_of(
            self.graph, self.costs_us, self.memory, self.pinned, self.generator_state_bytes
        )
        self._model = self._problem.task(self.budget_bytes).model
        self._choice = Choice(
            model=self._model,
            costs_us=self.costs_us,
            rates=self.terms.rates,
            host_bytes=self.terms.host_bytes,
            least_bytes=self.terms.least_bytes,
        )

    @property
    def _all(self) -> Sequence[Plan]:
        return [*self.plans, *self.known]

    @property
    def fits_with_all(self) -> bool:
        """Whether keeping all fits."""
        return self._problem.evaluate(self._problem.all_kept).peak_bytes <= self.budget_bytes

    @property
    def may_be_worse_than_alone(self) -> bool:
        """Whether a plan without offload may be faster, or smaller where none fits: no bound excludes it."""
        if self.terms.is_last_resort and (self._all or self.errors):
            return False
        moments, work = [self._model.between], self._problem.evaluate.work.part(self.time_limit_s)
        if self._all:
            fastest = min(plan.added_us for plan in self._all)
            return fastest > least_us(self._model, self.budget_bytes, moments, work)
        smallest = min((e.smallest_bytes or inf for e in self.errors), default=inf)
        return smallest > least_bytes(self._model, moments, work)

    def add_alone(self, known: Sequence[Plan]) -> None:
        """Search for a plan without offload; if there is one with it, not for the smallest."""
        goals = ("fastest",) if self._all else ("fastest", "smallest")
        searches = [search for search in SEARCHES if search.goal in goals]
        try:
            self.plans.append(self.solved(self.budget_bytes, known=known, searches=searches))
        except BudgetError as error:
            self.errors.append(error)

    def proposals(self) -> Iterator[frozenset[int]]:
        """Yield different sets of storages for the host, until one is as good as any can be."""
        choice, work = self._choice, self._problem.evaluate.work
        seen: set[frozenset[int]] = {frozenset()}
        if len(choice.candidates) <= FEW_CANDIDATES:
            yield from map(frozenset, choice.subsets_that_fit())
            return
        for target, part, counts_forward in self._ways():
            if self.plans and not counts_forward:
                continue  # the operation of forward that needs the most fits, and is no more in the way
            if self.plans and self._is_enough(part, next_number=len(seen)):
                return
            away = choice.within(
                target,
                work.part(self.time_limit_s),
                least_part=part,
                counts_forward=counts_forward,
            )
            if away is not None and away not in seen:
                seen.add(away)
                yield away
        if not self._all and (rest := choice.all_that_fit()) not in seen:
            yield rest

    def _ways(self) -> Iterator[tuple[float, float, bool]]:
        """Yield ways to propose: what is held, the part of a value that makes it one, and whether forward counts."""
        first, *others = targets(float(self.budget_bytes), self._choice.always_bytes)
        yield first, WHOLE, True
        yield first, HALF, False
        yield from ((target, WHOLE, True) for target in others)
        yield from ((target, HALF, True) for target in (first, *others))

    def _is_enough(self, part: float, *, next_number: int) -> bool:
        """Return whether the fastest plan is so near the bound that the proposal with this number is not worth it."""
        would_be_long = next_number * len(self.graph.ops) > effort.MOST_OPS_OF_PROPOSALS
        if would_be_long and part == HALF:
            return True
        gap_us = min(plan.added_us for plan in self.plans) - self._bound_us
        gap = effort.GOOD_GAP if would_be_long or part == HALF else effort.NEAR_BOUND
        return gap_us <= gap * sum(self.costs_us)

    @cached_property
    def _bound_us(self) -> float:
        """A lower bound on the time that any mix adds."""
        work = self._problem.evaluate.work.part(self.time_limit_s)
        return self._choice.bound_us(self.budget_bytes, work)

    def add(self, away: frozenset[int]) -> None:
        """Plan the rest with these storages on the host."""
        names = [self.graph.storages[s].name for s in away]
        pinned = Actions({**self.pinned, **dict.fromkeys(names, OFFLOAD)})
        try:
            limit_s = self.time_limit_s / MOST_PROPOSALS
            plan = self.solved(self.budget_bytes, pinned=pinned, time_limit_s=limit_s)
        except BudgetError as error:
            self.errors.append(error)
            return
        self.plans.append(self._timed(plan))

    def best(self) -> Plan:
        """Return the fastest plan; of equals the one that offloads the least.

        Raises:
            BudgetError: there is none.
        """
        if not self._all:
            raise self._no_plan()
        found = min(self._all, key=lambda plan: (plan.added_us, plan.offloaded_bytes))
        return replace(found, lower_bound_us=min(self._bound_us, found.added_us))

    def solved(self, budget_bytes: int | None, **others: Any) -> Plan:
        return solve(
            self.graph,
            budget_bytes=budget_bytes,
            costs_us=self.costs_us,
            memory=self.memory,
            generator_state_bytes=self.generator_state_bytes,
            bounds_smallest=False,  # an error of mixes has a bound of its own
            **{"pinned": self.pinned, "time_limit_s": self.time_limit_s, **others},
        )

    def _timed(self, plan: Plan) -> Plan:
        """Return the plan with the time for which its copies hold it up, without the bound of its search."""
        plan = replace(plan, copies_within_bytes=self.budget_bytes, lower_bound_us=0.0)
        time = timed(
            plan,
            self.graph,
            self.costs_us,
            self.memory,
            self.terms,
            self.generator_state_bytes,
        )
        kept = self._problem.evaluate(self._problem.all_kept)
        return replace(plan, exposed_us=time.exposed_us, keep_all_peak_bytes=kept.peak_bytes)

    def _no_plan(self) -> BudgetError:
        """Return the error of the smallest plan of all."""
        smallest = min(self.errors, key=lambda e: e.smallest_bytes or 0)
        assert smallest.smallest_bytes is not None
        assert smallest.smallest_plan is not None
        return BudgetError.no_plan(
            budget_bytes=self.budget_bytes,
            smallest_bytes=smallest.smallest_bytes,
            bound_bytes=min(least_offloaded_bytes(self._choice), smallest.smallest_bytes),
            smallest_plan=self._smallest_timed(smallest.smallest_plan),
        )

    def _smallest_timed(self, plan: Plan) -> Plan:
        if not plan.actions.offloaded:
            return plan
        return replace(self._timed(plan), copies_within_bytes=plan.predicted_peak_bytes)


def least_offloaded_bytes(choice: Choice) -> int:
    """Return a lower bound on the peak of all mixes: what is live while nothing that can be away is there."""
    live = choice.model.always_live
    needs = choice.model.needs
    fixed = (needs.must_keep & needs.first.keys()) - set(choice.candidates)
    here = sum(needs.graph.storages[s].nbytes for s in fixed)
    return int(max(live.forward[-1] + here, live.forward.max(), live.backward.max()))
