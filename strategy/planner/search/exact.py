"""Searches the fastest plan within a budget, or the plan with the smallest peak.

The linear program proposes a plan; the exact simulation says at which moments it exceeds the budget, and these become
rows. If a moment has a row, but the row counts too little for the plan at hand, the row is corrected by the bytes that
it missed; corrections follow the plan and can fall again. A graph with few decisions is searched exhaustively instead:
there, a plan that does not fit is excluded, nothing is corrected, and the result is proven.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf
from typing import Protocol

from thunder_memsave.planner.linear.bounds import SAFE, least_bytes, least_us
from thunder_memsave.planner.linear.pace import Pace
from thunder_memsave.planner.linear.peak_program import Effort, Moment, PeakModel, Solved
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator

_FEW_DECISIONS = 16
_MANY_DECISIONS = 800
"""Number of decisions above which integer programs take minutes; other searches and the relaxed bound must do there."""
_SEVERAL_DECISIONS = 250
_MOST_ROUNDS = 12
_MOST_VAIN_ROUNDS = 3
_MOST_ROUNDS_OF_FEW = 1 << _FEW_DECISIONS
_MOST_NEW_ROWS = 160
_GAP = 2e-3
_GOOD_GAP = 8e-3
"""Gap to the bound at which a plan is good enough, for a graph with many decisions."""
_NO_GAP = 1e-9
_GAPS_OF_SMALLEST = (3e-2, 1e-2)
"""Gaps of the first program for the smallest plan, and of the next ones. A coarse solution teaches as much, in a tenth
of the time."""
_MOST_NODES = 200
_MOST_BOUNDING, _MOST_TOGETHER = 10, 3
"""Most moments in the programs that bound all plans: one by one, and together."""
_MOST_BOUNDING_OF_MANY = 1
"""The same for a graph with many decisions, where each moment takes a second."""
_BOUNDING_S, _BOUNDING_OF_MANY_S = 60.0, 3.0
"""Time limit of one bounding program, in seconds."""
_SHORTEST_S = 0.5
"""Time limit of a program when the time is over."""
_PARTS = 12
"""Number of parts of backward in which a typical plan gets a row."""
_NEAR = 0.9
"""Fraction of the budget below which a moment does not bind."""


class _Bound(Protocol):
    """A lower bound on all plans, by the bytes live at some moments; 0 when the time is over."""

    def __call__(self, moments: Sequence[Moment], /, *, time_limit_s: float) -> float: ...


@dataclass(kw_only=True)
class Search:
    """Searches plans with one model, and keeps the rows, corrections and bounds that it learned."""

    model: PeakModel
    evaluate: Evaluator
    deadline_s: float
    """End of the search by `time.thread_time`: a busy machine does not change the plan."""
    pace: Pace = field(default_factory=Pace)
    bound_us: float = 0.0
    bound_bytes: float = 0.0
    _seen: set[frozenset[int]] = field(default_factory=set)

    @property
    def is_exhaustive(self) -> bool:
        """True if there are so few decisions that the search goes on until the best plan is proven."""
        needs, pinned = self.model.needs, self.model.pinned
        return len(needs.storages) - len(pinned) <= _FEW_DECISIONS

    @property
    def has_several(self) -> bool:
        """True if there are so many decisions that an integer program for the smallest plan takes a minute."""
        return len(self.model.needs.storages) > _SEVERAL_DECISIONS

    @property
    def has_many(self) -> bool:
        """True if there are so many decisions that integer programs take minutes."""
        return len(self.model.needs.storages) > _MANY_DECISIONS

    def fastest(self, budget_bytes: float) -> Evaluated | None:
        """Return the fastest plan that was found within the budget; `bound_us` is then a lower bound on all plans."""
        vain = 0
        best = self.evaluate.fastest_within(budget_bytes)
        if not self.is_exhaustive:
            self._bound_time(budget_bytes, best)
        for _ in range(self._most_rounds):
            if self._is_good(best) or (solved := self._propose(budget_bytes)) is None:
                break
            found = self.evaluate(solved.keep)
            if found.peak_bytes > budget_bytes:
                self._learn(solved, found, budget_bytes)
            elif self.is_exhaustive or not self._loosen(solved, found):
                break
            previous, best = best, self.evaluate.fastest_within(budget_bytes)
            vain = 0 if best is not previous or best is None else vain + 1
            if vain == _MOST_VAIN_ROUNDS and not self.is_exhaustive:
                break
        return self.evaluate.fastest_within(budget_bytes)

    def is_proven(self, budget_bytes: float) -> bool:
        """Tell whether the fastest known plan is near its lower bound."""
        best = self.evaluate.fastest_within(budget_bytes)
        if best is None:
            return False
        self._bound_time(budget_bytes, best)
        return best.recompute_us * SAFE <= self.bound_us * (1 + _GOOD_GAP)

    def smallest(self, *, enough_bytes: float = 0.0) -> Evaluated:
        """Return the plan with the smallest peak, or the first found that needs no more than `enough_bytes`."""
        if not self.is_exhaustive and not self.bound_bytes:
            self.bound_bytes = float(self.least_possible())
        gaps = [_NO_GAP] if self.is_exhaustive else list(_GAPS_OF_SMALLEST)
        for _ in range(0 if self.has_several else self._most_rounds):
            before = self.evaluate.smallest
            if before.peak_bytes <= enough_bytes:
                break
            solved = self.model.smallest(self._effort(gaps[0]))
            if solved.solution.values is None:
                break
            if solved.is_bound:
                proven_bytes = _proven(solved, self.model.unit_bytes)
                self.bound_bytes = max(self.bound_bytes, float(_rounded_up(proven_bytes)))
            found, smallest = self.evaluate(solved.keep), self.evaluate.smallest
            is_enough = smallest.peak_bytes <= enough_bytes
            if is_enough or smallest.peak_bytes * SAFE <= self.bound_bytes * (1 + gaps[-1]) + 1:
                break
            if self.is_late or (smallest is before and found.keep in self._seen and not gaps[1:]):
                break
            if smallest is before or smallest is found:
                gaps = gaps[1:] or gaps
            live_bytes = max(solved.live_bytes.values(), default=0)
            self._learn(solved, found, min(smallest.peak_bytes, live_bytes))
        if not self.is_exhaustive and not self.has_many:
            self.add_moments(self.evaluate.smallest, _NEAR * self.evaluate.smallest.peak_bytes)
            self.bound_bytes = max(self.bound_bytes, float(self.least_possible()))
        return self.evaluate.smallest

    def least_possible(self, *, deadline_s: float = inf) -> int:
        """Return a lower bound on the peak bytes of all plans, as far as the rows say and the time reaches."""
        until_s = min(deadline_s, self.deadline_s)
        found = self._bound(partial(least_bytes, self.model), until_s)
        if not self.has_many:
            solved = self.model.smallest(self._to_the_end(until_s), relaxed=True)
            found = max(found, _proven(solved, self.model.unit_bytes))
        return _rounded_up(found)

    def relaxed_us(self, budget_bytes: float, *, enough_us: float = inf) -> float:
        """Return a lower bound on the time of plans within the budget; the search for it ends at `enough_us`."""
        of = partial(least_us, self.model, budget_bytes)
        found = self._bound(of, self.deadline_s, enough=enough_us)
        if not self.has_several or (found < enough_us and not self.has_many):
            effort = self._to_the_end(self.deadline_s)
            solved = self.model.fastest(budget_bytes, effort, relaxed=True)
            found = max(found, _proven(solved, self.model.unit_us))
        return found

    def add_typical(self, plans: Iterable[Evaluated], budget_bytes: float) -> None:
        """Give rows to the moments at which typical plans need the most, one per part of backward."""
        for found in plans:
            new = _highest_of_parts(found, _NEAR * budget_bytes)
            self.model.corrections.update(
                dict.fromkeys((m for m in new if m not in self.model.corrections), 0.0)
            )

    def add_moments(self, found: Evaluated, budget_bytes: float) -> bool:
        """Give rows to the moments at which a plan exceeds the budget; tell whether there were new ones."""
        new = [m for m in _worst(found, budget_bytes) if m not in self.model.corrections]
        self.model.corrections.update(dict.fromkeys(new[:_MOST_NEW_ROWS], 0.0))
        return bool(new)

    def _propose(self, budget_bytes: float) -> Solved | None:
        if self.is_late:
            return None
        solved = self.model.fastest(budget_bytes, self._effort(self._gap))
        none = inf if solved.is_bound and solved.solution.is_infeasible else 0.0
        self.bound_us = max(self.bound_us, none, _proven(solved, self.model.unit_us))
        if solved.solution.values is not None:
            return solved
        if not self._is_corrected or not solved.solution.is_infeasible:
            return None
        self._scale_corrections(0.5)
        return self._propose(budget_bytes)

    def _is_good(self, best: Evaluated | None) -> bool:
        return best is not None and best.recompute_us * SAFE <= self.bound_us * (1 + self._gap)

    @property
    def _most_rounds(self) -> int:
        if self.is_exhaustive:
            return _MOST_ROUNDS_OF_FEW
        return 0 if self.has_many else _MOST_ROUNDS

    def _learn(self, solved: Solved, found: Evaluated, budget_bytes: float) -> None:
        """Add the rows, corrections or exclusion that rule out a plan that does not fit."""
        is_new = self.add_moments(found, budget_bytes)
        if self.is_exhaustive:
            if not is_new:
                self.model.excluded.append((found.keep, found.decided))
            return
        for moment in _worst(found, budget_bytes):
            missed = found.live_bytes[moment] - solved.live_bytes.get(moment, inf)
            # Bytes below the solver's gap are not corrected: without corrections, the program bounds all plans.
            if missed > self._gap * budget_bytes / 2:
                self.model.corrections[moment] = missed
        if found.keep in self._seen:
            self.model.excluded.append((found.keep, found.decided))
        self._seen.add(found.keep)

    def _loosen(self, solved: Solved, found: Evaluated) -> bool:
        """Lower corrections to the bytes that rows miss for a plan that fits; tell whether the next can be faster."""
        if found.keep in self._seen:
            return False
        self._seen.add(found.keep)
        changed = False
        for moment, correction in self.model.corrections.items():
            live = found.live_bytes.get(moment)
            missed = 0.0 if live is None else max(0.0, live - solved.live_bytes[moment])
            if missed < correction - self.model.unit_bytes:
                self.model.corrections[moment] = missed
                changed = True
        return changed

    def _bound_time(self, budget_bytes: float, best: Evaluated | None) -> None:
        if best is not None:
            self.add_typical([best], budget_bytes)
        enough_us = inf if best is None else best.recompute_us / (1 + _GOOD_GAP)
        if self.bound_us < enough_us:
            found_us = self.relaxed_us(budget_bytes, enough_us=enough_us)
            self.bound_us = max(self.bound_us, found_us)

    def _bound(self, of: _Bound, until_s: float, *, enough: float = inf) -> float:
        """Bound plans by the moment between forward and backward, and by it and others together, until `enough`."""
        between = Moment("forward", self.model.needs.graph.num_forward)
        moments = [m for m in self.model.corrections if m != between]
        most = _MOST_BOUNDING_OF_MANY if self.has_many else _MOST_BOUNDING
        bounds = {between: of([between], time_limit_s=self._bounding_s(until_s))}
        for moment in moments[:most]:
            if max(bounds.values()) < enough and time.thread_time() < until_s:
                together = [between, moment]
                bounds[moment] = of(together, time_limit_s=self._bounding_s(until_s))
        hardest = sorted(bounds, key=lambda m: (-bounds[m], m))[:_MOST_TOGETHER]
        found = max(bounds.values())
        if len(hardest) > 2 and found < enough and time.thread_time() < until_s:
            found = max(found, of(hardest, time_limit_s=self._bounding_s(until_s)))
        return found

    def _bounding_s(self, until_s: float) -> float:
        """Return the time limit of one bounding program, in wall-clock seconds."""
        most_s = _BOUNDING_OF_MANY_S if self.has_many else _BOUNDING_S
        left_s = max(_SHORTEST_S, until_s - time.thread_time())
        return self.pace.wall_s(min(most_s, left_s))

    def _scale_corrections(self, factor: float) -> None:
        for moment, correction in self.model.corrections.items():
            scaled = correction * factor
            self.model.corrections[moment] = scaled if scaled > self.model.unit_bytes else 0.0

    @property
    def _is_corrected(self) -> bool:
        return any(self.model.corrections.values())

    @property
    def _gap(self) -> float:
        return _NO_GAP if self.is_exhaustive else _GAP

    @property
    def _left_s(self) -> float:
        return self.deadline_s - time.thread_time()

    @property
    def is_late(self) -> bool:
        """True if the time is over."""
        return self._left_s <= 0

    def _effort(self, gap: float) -> Effort:
        most_nodes = None if self.is_exhaustive else _MOST_NODES
        limit_s = self.pace.wall_s(max(_SHORTEST_S, self._left_s))
        return Effort(gap=gap, most_nodes=most_nodes, time_limit_s=limit_s)

    def _to_the_end(self, deadline_s: float) -> Effort:
        left_s = max(2.0, deadline_s - time.thread_time())
        return Effort(gap=_NO_GAP, time_limit_s=self.pace.wall_s(left_s))


def _proven(solved: Solved, unit: float) -> float:
    """Return a program's lower bound on all plans, with the solver's tolerance taken off; 0 if it bounds only some."""
    return max(0.0, solved.solution.bound * SAFE * unit) if solved.is_bound else 0.0


def _rounded_up(bound_bytes: float) -> int:
    """Round a bound up: a peak is an integer number of bytes."""
    return ceil(bound_bytes)


def _highest_of_parts(found: Evaluated, over_bytes: float) -> Iterable[Moment]:
    """Return the moment of the peak in forward and in each part of backward, where it is above `over_bytes`."""
    last = max((m.position for m in found.live_bytes if m.phase != "forward"), default=0)
    highest: dict[int, tuple[int, Moment]] = {}
    for moment, nbytes in found.live_bytes.items():
        part = -1 if moment.phase == "forward" else moment.position * _PARTS // (last + 1)
        if nbytes > max(over_bytes, highest.get(part, (0,))[0]):
            highest[part] = (nbytes, moment)
    return [moment for _, moment in highest.values()]


def _worst(found: Evaluated, budget_bytes: float) -> Sequence[Moment]:
    """Return the highest moment of each run of moments over the budget, the worst first."""
    runs: list[list[tuple[int, Moment]]] = [[]]
    for moment, nbytes in found.live_bytes.items():
        if nbytes > budget_bytes:
            runs[-1].append((nbytes, moment))
        elif runs[-1]:
            runs.append([])
    highest: Iterable[tuple[int, Moment]] = sorted((max(run) for run in runs if run), reverse=True)
    return [moment for _, moment in highest]
