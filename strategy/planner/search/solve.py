"""Solves for a plan: the least recompute time with which a training step stays within a byte budget."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.actions import (
    KEEP,
    NO_ACTIONS,
    RECOMPUTE,
    REGATHER,
    REPLAY,
    Action,
    Actions,
)
from thunder_memsave.planner.choices import Needs, needs
from thunder_memsave.planner.graph import Decision, Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.linear.peak_program import PeakModel
from thunder_memsave.planner.order import CPU_GENERATOR_STATE_BYTES
from thunder_memsave.planner.search.by_layers import search_layers
from thunder_memsave.planner.search.by_moments import search_moments
from thunder_memsave.planner.search.by_price import anchors, search_prices
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator
from thunder_memsave.planner.search.exact import Search
from thunder_memsave.planner.search.free_wins import choose_free
from thunder_memsave.planner.search.local_moves import improve, shrink
from thunder_memsave.planner.search.smallest import search_smallest

Policy = Literal["plan", "keep_all", "recompute_all"]

_NOTHING_ELSE = StepMemory()
_ANCHORS = (1, 2, 3)
_PART_OF_MOMENTS = 0.6
_PART = 0.27
"""Fractions of the time limit: for the search by moments; and for each of the bound on the peak and the search by
layers."""
_LONGER = 1.5
"""Factor on the time limit for the smallest plan, since without it there is none."""


def solve(
    graph: TrainingGraph,
    *,
    budget_bytes: int | None,
    costs_us: Sequence[float],
    memory: StepMemory = _NOTHING_ELSE,
    policy: Policy = "plan",
    pinned: Actions = NO_ACTIONS,
    known: Sequence[Plan] = (),
    generator_state_bytes: int = CPU_GENERATOR_STATE_BYTES,
    time_limit_s: float = 10.0,
) -> Plan:
    """Choose an action for each storage that backward needs.

    The cost of a plan is its recompute time beyond the free wins, which every plan may use and which are not counted.

    Args:
        graph: Forward and backward before recomputation.
        budget_bytes: The largest peak of a step, by the exact simulation; None: no limit.
        costs_us: Microseconds of each operation.
        memory: Bytes that a step holds besides.
        policy: `keep_all` uses the free wins only, `recompute_all` keeps only storages that cannot be recomputed and
            those that pass from layer to layer, as far as that makes the peak smaller; neither looks at the budget.
        pinned: Actions by names of storages: kept if backward reads them; or recomputed if they can be, which counts
            as a free win.
        known: Other plans for this graph; one that fits is returned if the search finds none that is faster. With
            all plans for smaller budgets here, time never rises with the budget.
        generator_state_bytes: Bytes that forward keeps for each random operation that backward recomputes.
        time_limit_s: CPU seconds after which the search returns the best plan so far; its gap says how good it is.

    Returns:
        A plan whose simulated peak is within the budget.

    Raises:
        BudgetError: no plan was found.
    """
    problem = _problem(graph, costs_us, memory, pinned, generator_state_bytes)
    free = problem.evaluate(problem.free)
    if policy == "recompute_all":
        # With nothing kept, backward would begin with all of forward, and hold what it makes until it is read.
        smallest = min(problem.anchored(), key=lambda e: (e.peak_bytes, e.recompute_us))
        return problem.plan(smallest, None, bound_us=0.0)
    if policy == "keep_all" or budget_bytes is None or free.peak_bytes <= budget_bytes:
        return problem.plan(free, budget_bytes if policy == "plan" else None, bound_us=0.0)
    for plan in known:
        problem.evaluate(problem.numbers(plan.actions.kept))
    search = problem.search(time.thread_time() + time_limit_s)
    search.add_moments(free, budget_bytes)
    if search.is_exhaustive:
        found, layered_us = search.fastest(budget_bytes), 0.0
    else:
        found, layered_us = _fastest(problem, search, free, budget_bytes, time_limit_s)
    if found is None:
        found = _last_resort(problem, budget_bytes, time_limit_s)
    return replace(
        problem.plan(found, budget_bytes, bound_us=min(search.bound_us, found.recompute_us)),
        layered_bound_us=min(layered_us, found.recompute_us),
    )


def pareto(
    graph: TrainingGraph,
    *,
    costs_us: Sequence[float],
    memory: StepMemory = _NOTHING_ELSE,
    pinned: Actions = NO_ACTIONS,
    num_points: int = 12,
    generator_state_bytes: int = CPU_GENERATOR_STATE_BYTES,
    time_limit_s: float = 5.0,
) -> list[tuple[int, float]]:
    """Bound the recompute time of plans for several budgets: a curve from which to choose a budget.

    Args:
        graph: As for `solve`, and so are the others.
        costs_us: Microseconds of each operation.
        memory: Bytes that a step holds besides.
        pinned: Actions by names of storages that are not chosen.
        num_points: Number of budgets, evenly spaced from the lower bound on the peak to the peak of the free wins.
        generator_state_bytes: Bytes that forward keeps for each random operation that backward recomputes.
        time_limit_s: CPU seconds for the whole curve; points for the smallest budgets are left out when they are over.

    Returns:
        Budgets in bytes, rising, with lower bounds on the recompute time in microseconds, falling to 0.
    """
    problem = _problem(graph, costs_us, memory, pinned, generator_state_bytes)
    free = problem.evaluate(problem.free)
    search = problem.search(time.thread_time() + time_limit_s)
    least_bytes = search.least_possible()
    points, us = [(free.peak_bytes, 0.0)], 0.0
    for number in range(num_points - 2, -1, -1):
        if search.is_late:
            break
        budget_bytes = least_bytes + (free.peak_bytes - least_bytes) * number // (num_points - 1)
        search.add_moments(free, budget_bytes)
        # A bound on the time for a larger budget bounds that for a smaller one too.
        us = max(us, search.relaxed_us(budget_bytes))
        points.append((int(budget_bytes), us))
    return points[::-1]


def _fastest(
    problem: _Problem, search: Search, free: Evaluated, budget_bytes: int, time_limit_s: float
) -> tuple[Evaluated | None, float]:
    """Return the fastest plan that several searches have found, and the bound on plans of layers.

    The search by moments is the best for many layers; the others run only if it does not prove its plan.
    """
    model, evaluate = search.model, problem.evaluate
    start_s, part_s, layered_us = time.thread_time(), _PART * time_limit_s, 0.0
    if search.has_several:
        search_moments(
            model,
            evaluate,
            free=free,
            budget_bytes=budget_bytes,
            deadline_s=start_s + _PART_OF_MOMENTS * time_limit_s,
            pace=search.pace,
        )
        if search.is_proven(budget_bytes):
            return evaluate.fastest_within(budget_bytes), layered_us
    # A known plan that fits is not given up for a bound, which is only as exact as the solver's tolerance.
    if evaluate.fastest_within(budget_bytes) is None:
        least_bytes = search.least_possible(deadline_s=time.thread_time() + part_s)
        if least_bytes > budget_bytes:
            return None, 0.0
    layered_us = search_layers(
        model,
        evaluate,
        budget_bytes=budget_bytes,
        deadline_s=time.thread_time() + part_s,
    )
    if evaluate.fastest_within(budget_bytes) is None:
        search_prices(
            model,
            evaluate,
            free=free,
            budget_bytes=budget_bytes,
            deadline_s=time.thread_time() + 0.4 * time_limit_s,
        )
    deadline_s = time.thread_time() + 0.15 * time_limit_s
    improve(model, evaluate, budget_bytes=budget_bytes, deadline_s=deadline_s)
    if not search.has_many:
        search.add_typical(problem.typical(), budget_bytes)
    return search.fastest(budget_bytes), layered_us


def _last_resort(problem: _Problem, budget_bytes: int, time_limit_s: float) -> Evaluated:
    """Search for the smallest plan instead of the fastest, for a budget near the least that is possible.

    The search starts anew, without what was learned for this budget, so that it finds the same plan again when the
    user takes the smallest budget that the error names.
    """
    problem.evaluate.forget()
    search = problem.search(time.thread_time() + _LONGER * time_limit_s)
    free = problem.evaluate(problem.free)
    search.add_moments(free, 1)
    if not search.is_exhaustive:
        search.bound_bytes = float(search.least_possible())
        search.add_typical(problem.typical(), search.bound_bytes)
        _shrink(search, free, budget_bytes, time_limit_s)
    smallest = search.smallest(enough_bytes=budget_bytes)
    if smallest.peak_bytes <= budget_bytes:
        deadline_s = time.thread_time() + 0.3 * time_limit_s
        improve(search.model, search.evaluate, budget_bytes=budget_bytes, deadline_s=deadline_s)
        return search.evaluate.fastest_within(budget_bytes) or smallest
    bound = min(int(search.bound_bytes), smallest.peak_bytes)
    raise BudgetError.no_plan(
        budget_bytes=budget_bytes,
        smallest_bytes=smallest.peak_bytes,
        bound_bytes=bound,
        smallest_plan=problem.plan(smallest, smallest.peak_bytes, bound_us=0.0),
    )


def _shrink(search: Search, free: Evaluated, budget_bytes: int, time_limit_s: float) -> None:
    """Search for a smaller plan with the searches that take little time per plan."""
    model, evaluate, start_s = search.model, search.evaluate, time.thread_time()
    if search.has_several:
        search_smallest(
            model,
            evaluate,
            free=free,
            bound_bytes=search.bound_bytes,
            enough_bytes=budget_bytes,
            deadline_s=start_s + time_limit_s,
            pace=search.pace,
        )
    deadline_s = max(start_s + time_limit_s, time.thread_time() + 0.2 * time_limit_s)
    shrink(model, evaluate, enough_bytes=budget_bytes, deadline_s=deadline_s)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    needs: Needs
    free: frozenset[int]
    least: frozenset[int]
    evaluate: Evaluator
    pinned: Mapping[int, bool]
    costs_us: Sequence[float]

    def numbers(self, names: Set[str]) -> frozenset[int]:
        storages = self.needs.graph.storages
        return frozenset(s for s in self.needs.storages if storages[s].name in names)

    def typical(self) -> Iterator[Evaluated]:
        """Yield typical plans, which show where memory is needed."""
        yield from self.anchored()
        yield self.evaluate(self.free)

    def anchored(self) -> Iterator[Evaluated]:
        """Yield plans that keep what must be kept, and none, all, every second, ... of the anchors."""
        points = anchors(self.needs)
        yield self.evaluate(self.least)
        for every in _ANCHORS:
            pinned = {s for s, is_kept in self.pinned.items() if not is_kept}
            kept = {s for live in points[::-every] for s in live} - pinned
            yield self.evaluate(self.least | kept)

    def search(self, deadline_s: float) -> Search:
        model = PeakModel(
            needs=self.needs,
            costs_us=self.evaluate.costs_us,
            memory=self.evaluate.memory,
            generator_state_bytes=self.evaluate.generator_state_bytes,
            pinned=self.pinned,
        )
        return Search(model=model, evaluate=self.evaluate, deadline_s=deadline_s)

    def plan(self, found: Evaluated, budget_bytes: int | None, *, bound_us: float) -> Plan:
        storages = self.needs.graph.storages
        return Plan(
            actions=self.actions(found),
            budget_bytes=budget_bytes,
            predicted_peak_bytes=found.peak_bytes,
            keep_all_peak_bytes=self.evaluate(self.free).peak_bytes,
            saved_bytes=sum(storages[s].nbytes for s in found.keep),
            recompute_us=found.recompute_us,
            lower_bound_us=bound_us,
            decisions=tuple(self._decisions(found)),
        )

    def actions(self, found: Evaluated) -> Actions:
        """Return the actions of all storages read in backward, so that plans that keep the same have equal actions."""
        storages = self.needs.graph.storages
        read = [s for s in self.needs.storages if s in found.decided]
        return Actions({storages[s].name: self._action(s, found.keep) for s in read})

    def _decisions(self, found: Evaluated) -> Iterator[Decision]:
        graph = self.needs.graph
        counted: set[int] = set()
        for storage in self.needs.storages:
            if storage not in found.keep and storage not in self.needs.first:
                continue
            op = graph.ops[self.needs.producer[storage]]
            chain = self._chain(storage, found.keep) - counted
            if storage not in found.keep:
                counted |= chain
            yield Decision(
                name=graph.storages[storage].name,
                nbytes=graph.storages[storage].nbytes,
                cost_us=sum(self.costs_us[o] for o in chain),
                reason=self._reason(storage, found.keep),
                source=op.source,
                module=op.module,
            )

    def _chain(self, storage: int, kept: Set[int]) -> set[int]:
        """Return the operations that recompute a storage from the kept ones."""
        found: set[int] = set()
        stack = [storage]
        while stack:
            op = self.needs.producer[stack.pop()]
            if op in self.needs.inputs and op not in found:
                found.add(op)
                stack += [s for s in self.needs.inputs[op] if s not in kept]
        return found

    def _action(self, storage: int, kept: Set[int]) -> Action:
        if storage in kept:
            return KEEP
        op = self.needs.graph.ops[self.needs.producer[storage]]
        if self.needs.graph.storages[storage].kind == "gathered":
            return REGATHER
        return REPLAY if op.repeat == "replay" else RECOMPUTE

    def _reason(self, storage: int, kept: Set[int]) -> str:
        if storage in self.needs.must_keep:
            return "cannot be recomputed"
        if storage in self.pinned:
            return "pinned"
        if storage in kept:
            return (
                "needed to recompute others"
                if storage not in self.needs.first
                else ("faster to keep than to recompute")
            )
        return (
            "the budget needs its memory"
            if storage in self.free
            else ("cheap to recompute from others")
        )


def _problem(
    graph: TrainingGraph,
    costs_us: Sequence[float],
    memory: StepMemory,
    pinned: Actions,
    generator_state_bytes: int,
) -> _Problem:
    found = needs(graph)
    free = choose_free(found, pinned=pinned)
    kept = frozenset(s for s in found.storages if graph.storages[s].name in free)
    evaluate = Evaluator(
        needs=found, costs_us=costs_us, memory=memory, generator_state_bytes=generator_state_bytes
    )
    # Operations that the free wins recompute are not counted.
    free_again = evaluate.again(kept)
    evaluate.costs_us = tuple(0.0 if o in free_again else us for o, us in enumerate(costs_us))
    return _Problem(
        needs=found,
        free=kept,
        least=frozenset(found.must_keep) | _read_of(found, pinned.kept),
        evaluate=evaluate,
        pinned=_pinned(found, pinned),
        costs_us=costs_us,
    )


def _read_of(needs: Needs, names: Set[str]) -> frozenset[int]:
    """Return the storages of these names that backward reads."""
    return frozenset(s for s in needs.first if needs.graph.storages[s].name in names)


def _pinned(needs: Needs, pinned: Actions) -> dict[int, bool]:
    """Return the pinned storages: True for kept, False for recomputed."""
    recompute = pinned.keys() - pinned.kept
    again = {
        s
        for s in needs.storages
        if needs.graph.storages[s].name in recompute and s not in needs.must_keep
    }
    return dict.fromkeys(again, False) | dict.fromkeys(_read_of(needs, pinned.kept), True)
