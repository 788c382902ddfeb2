"""Solves for a plan: the least recompute time with which a training step stays within a byte budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from thunder_memsave.errors import BudgetError
from thunder_memsave.planner import effort
from thunder_memsave.planner.actions import NO_ACTIONS, Actions
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.linear.bounds import SAFE, bound_bytes, bound_us, least_bytes
from thunder_memsave.planner.order import CPU_GENERATOR_STATE_BYTES
from thunder_memsave.planner.search.all_plans import (
    fastest_of_all,
    has_few_decisions,
    smallest_of_all,
)
from thunder_memsave.planner.search.by_moments import search_moments
from thunder_memsave.planner.search.evaluate import Evaluated
from thunder_memsave.planner.search.local_moves import drop, improve
from thunder_memsave.planner.search.problem import Problem, problem_of
from thunder_memsave.planner.search.smallest import bisect
from thunder_memsave.planner.search.task import Task, highest_moments
from thunder_memsave.planner.work import Work

Policy = Literal["plan", "keep_all", "recompute_all"]

_NOTHING_ELSE = StepMemory()


@dataclass(frozen=True)
class Search:
    """A way to find plans."""

    name: str
    goal: Literal["fastest", "smallest"]
    share: float
    """Part of the limit on work."""
    run: Callable[[Task, Work], None]
    """Evaluates plans; the task's evaluator remembers them."""


SEARCHES = (
    Search("moments", "fastest", effort.SHARE_OF_MOMENTS, search_moments),
    Search("drop", "fastest", effort.SHARE_OF_DROP, drop),
    Search("improve", "fastest", effort.SHARE_OF_IMPROVE, improve),
    Search("bisect", "smallest", effort.SHARE_OF_BISECT, bisect),
    Search("improve smallest", "smallest", effort.SHARE_OF_IMPROVE, improve),
)
"""All searches, in the order in which they run."""


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
    time_limit_s: float = effort.TIME_LIMIT_S,
    searches: Sequence[Search] = SEARCHES,
    bounds_smallest: bool = True,
    spare_bytes: int = 0,
) -> Plan:
    """Choose an action for each storage that backward needs: the least recompute time.

    Args:
        graph: Forward and backward before recomputation.
        budget_bytes: The largest peak of a step, by the exact simulation; None: no limit.
        costs_us: Microseconds of each operation.
        memory: Bytes that a step holds besides.
        policy: `keep_all` recomputes what takes no time, `recompute_all` keeps only storages that cannot be recomputed
            and those that pass from layer to layer, as far as that makes the peak smaller; neither looks at the budget.
        pinned: Actions by names of storages: kept if backward reads them; or recomputed if they can be, which costs
            nothing.
        known: Other plans for this graph; one that fits is returned if the search finds none that is faster. With
            all plans for smaller budgets here, time never rises with the budget.
        generator_state_bytes: Bytes that forward keeps for each random operation that backward recomputes.
        time_limit_s: Work after which the best plan so far is returned, in seconds of a usual core: plans do not
            depend on the machine.
        searches: The searches to use; without some, plans can be worse.
        bounds_smallest: Whether an error's bound is worth work. If not, it counts one moment alone.
        spare_bytes: Bytes of the budget that are not filled with what is cheap to recompute: for collectives that run
            beside computation.

    Raises:
        BudgetError: no plan was found.
    """
    problem = problem_of(graph, costs_us, memory, pinned, generator_state_bytes)
    if policy == "recompute_all":
        return _least_kept(problem)
    if policy == "keep_all" or budget_bytes is None:
        return problem.plan(problem.evaluate(problem.all_kept), None, bound_us=0.0)
    all_kept = problem.evaluate(problem.all_kept)
    if all_kept.peak_bytes <= budget_bytes:
        return problem.plan(all_kept, budget_bytes, bound_us=0.0)
    cheap_bytes = problem.evaluate(problem.cheap).peak_bytes
    limit_bytes = budget_bytes
    if cheap_bytes <= budget_bytes:
        limit_bytes = max(budget_bytes - spare_bytes, cheap_bytes)
    problem.remember(known)
    plan = _planned(problem, limit_bytes, time_limit_s, searches, bounds_smallest=bounds_smallest)
    return replace(plan, budget_bytes=budget_bytes)


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
        num_points: Number of budgets, evenly spaced from the lower bound on the peak to the peak with all kept.
        generator_state_bytes: Bytes that forward keeps for each random operation that backward recomputes.
        time_limit_s: Work for the whole curve, as for `solve`; when it is over, points for the smallest budgets are
            left out.

    Returns:
        Budgets in bytes, rising, with lower bounds on the recompute time in microseconds, falling to 0.
    """
    problem = problem_of(graph, costs_us, memory, pinned, generator_state_bytes)
    all_kept, model = problem.evaluate(problem.all_kept), problem.task(0).model
    work = problem.evaluate.work.part(time_limit_s)
    least = least_bytes(model, [model.between], work)
    points, us = [(all_kept.peak_bytes, 0.0)], 0.0
    for number in range(num_points - 2, -1, -1):
        if work.is_over:
            break
        budget_bytes = int(least + (all_kept.peak_bytes - least) * number // (num_points - 1))
        moments = highest_moments(all_kept, budget_bytes)
        # A bound on the time for a larger budget bounds that for a smaller one too.
        us = max(us, bound_us(model, budget_bytes, moments, work.part(time_limit_s / num_points)))
        points.append((budget_bytes, us))
    return points[::-1]


def _least_kept(problem: Problem) -> Plan:
    # With nothing kept, backward would begin with all of forward, and hold what it makes until it is read.
    smallest = min(problem.anchored(), key=lambda e: (e.peak_bytes, e.recompute_us))
    return problem.plan(smallest, None, bound_us=0.0)


def _planned(
    problem: Problem,
    budget_bytes: int,
    time_limit_s: float,
    searches: Sequence[Search],
    *,
    bounds_smallest: bool,
) -> Plan:
    task = problem.task(budget_bytes)
    if has_few_decisions(task.model):
        found = fastest_of_all(task)
        if found is None:
            smallest = smallest_of_all(task)
            raise _no_plan(problem, budget_bytes, smallest, smallest.peak_bytes)
        return problem.plan(found, budget_bytes, bound_us=found.recompute_us)
    bound = 0.0
    if problem.evaluate.update_bytes <= budget_bytes:
        bound = _fastest(task, time_limit_s, [s for s in searches if s.goal == "fastest"])
    found = task.best
    if found is None:
        found = _last_resort(
            problem, budget_bytes, time_limit_s, searches, bounds_smallest=bounds_smallest
        )
    return problem.plan(found, budget_bytes, bound_us=bound)


def _fastest(task: Task, time_limit_s: float, searches: Sequence[Search]) -> float:
    """Search until a plan is near the lower bound on the time of all plans, and return that bound."""
    work, bound, model = task.evaluate.work, 0.0, task.model
    # A known plan that fits is not given up for a bound, which is only as exact as the solver's tolerance.
    if (
        task.best is None
        and least_bytes(model, [model.between], work.part(time_limit_s)) > task.budget_bytes
    ):
        return bound
    for search in searches:
        task.evaluate.finder = search.name
        search.run(task, work.part(search.share * time_limit_s))
        best = task.best
        if best is not None and not bound:
            moments = highest_moments(best, effort.NEAR_PEAK * task.budget_bytes)
            part = work.part(effort.SHARE_OF_PROOF * time_limit_s)
            enough = best.recompute_us / (1 + effort.GOOD_GAP)
            bound = bound_us(model, task.budget_bytes, moments, part, enough=enough)
        if best is not None and best.recompute_us * SAFE <= bound * (1 + effort.GOOD_GAP):
            break
    return bound


def _last_resort(
    problem: Problem,
    budget_bytes: int,
    time_limit_s: float,
    searches: Sequence[Search],
    *,
    bounds_smallest: bool,
) -> Evaluated:
    """Search for the smallest plan instead of the fastest, for a budget near the least that is possible.

    The search starts anew, without what was learned for this budget, so that it finds the same plan again when the
    user takes the smallest budget that the error names.
    """
    evaluate = problem.evaluate
    evaluate.forget()
    evaluate.finder, work = "anchors", evaluate.work
    task = problem.task(budget_bytes)
    list(problem.anchored())
    least = least_bytes(task.model, [task.model.between], work.part(time_limit_s))
    least = max(least, evaluate.update_bytes)
    task = replace(task, bound_bytes=least)
    for search in searches:
        if search.goal == "smallest" and task.smallest.peak_bytes > evaluate.update_bytes:
            evaluate.finder = search.name
            search.run(task, work.part(search.share * time_limit_s))
    if task.best is not None:
        return task.best
    if not bounds_smallest or task.smallest.peak_bytes <= evaluate.update_bytes:
        raise _no_plan(problem, budget_bytes, task.smallest, least)
    moments = highest_moments(task.smallest, effort.NEAR_PEAK * task.smallest.peak_bytes)
    bound = bound_bytes(task.model, moments, work.part(effort.SHARE_OF_PROOF * time_limit_s))
    raise _no_plan(problem, budget_bytes, task.smallest, max(bound, least))


def _no_plan(problem: Problem, budget_bytes: int, smallest: Evaluated, bound: float) -> BudgetError:
    """Return the error that names the smallest plan; a peak is an integer number of bytes, so the bound is too."""
    return BudgetError.no_plan(
        budget_bytes=budget_bytes,
        smallest_bytes=smallest.peak_bytes,
        bound_bytes=min(ceil(bound), smallest.peak_bytes),
        smallest_plan=problem.plan(smallest, smallest.peak_bytes, bound_us=0.0),
    )
