"""Searches the fastest plan within a budget, or the one that needs the least memory.

The linear program proposes a plan; the exact simulation says at which moments it needs more than the program knows of,
and these become rows. Where a moment has a row, but the row counts too little for the plan at hand, the row is
corrected by what it missed; corrections follow the plan and can fall again. A graph with few decisions is searched to
the end instead: there, a plan that does not fit is excluded, nothing is corrected, and the result is proven.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from thunder_memsave.planner.evaluate import Evaluated, Evaluator
from thunder_memsave.planner.model import Moment, PeakModel, Solved

_FEW_DECISIONS = 16
_MANY_DECISIONS = 800
"""Beyond, whole-numbered programs take minutes; plans at a price of memory must do, and the relaxed bound."""
_MOST_ROUNDS = 12
_MOST_VAIN_ROUNDS = 3
_MOST_ROUNDS_OF_FEW = 1 << _FEW_DECISIONS
_MOST_NEW_ROWS = 160
_GAP = 2e-3
_NO_GAP = 1e-9


@dataclass(kw_only=True)
class Search:
    """One model, and all that was learned about it."""

    model: PeakModel
    evaluate: Evaluator
    deadline_s: float
    """On the clock of `time.perf_counter`."""
    bound_us: float = 0.0
    bound_bytes: float = 0.0
    _seen: set[frozenset[int]] = field(default_factory=set)

    @property
    def is_exhaustive(self) -> bool:
        """Whether there are so few decisions that the search goes on until the best plan is proven to be that."""
        needs, pinned = self.model.needs, self.model.pinned
        return len(needs.storages) - len(pinned) <= _FEW_DECISIONS

    def fastest(self, budget_bytes: float) -> Evaluated | None:
        """The fastest plan that was found within the budget; `bound_us` says how fast any could be."""
        vain = 0
        best = self.evaluate.fastest_within(budget_bytes)
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
        if not self.is_exhaustive:
            self._bound_time(budget_bytes)
        return self.evaluate.fastest_within(budget_bytes)

    def smallest(self, *, enough_bytes: float = 0.0) -> Evaluated:
        """The plan with the smallest peak, or one that needs no more than `enough_bytes`."""
        if not self.is_exhaustive:
            self.bound_bytes = max(self.bound_bytes, float(self.least_possible()))
        for _ in range(self._most_rounds):
            solved = self.model.smallest(time_limit_s=self._share_s, gap=self._gap)
            if solved.solution.values is None:
                break
            believed_bytes = solved.solution.bound * self.model.unit_bytes
            if solved.is_bound:
                self.bound_bytes = max(self.bound_bytes, believed_bytes)
            found = self.evaluate(solved.keep)
            smallest = self.evaluate.smallest.peak_bytes
            if smallest <= max(enough_bytes, self.bound_bytes * (1 + self._gap) + 1):
                break
            if found.keep in self._seen or self.is_late:
                break
            self._learn(solved, found, min(smallest, max(solved.live_bytes.values(), default=0)))
        if not self.is_exhaustive:
            self.add_moments(self.evaluate.smallest, 0.99 * self.evaluate.smallest.peak_bytes)
            self.bound_bytes = max(self.bound_bytes, float(self.least_possible()))
        return self.evaluate.smallest

    def least_possible(self) -> int:
        """No plan needs less, as far as the rows say."""
        solved = self.model.smallest(relaxed=True, time_limit_s=max(self._left_s, 1.0), gap=_NO_GAP)
        return int(solved.solution.bound * self.model.unit_bytes)

    def relaxed_us(self, budget_bytes: float) -> float:
        """No plan within the budget is faster, as far as the rows say."""
        solved = self.model.fastest(
            budget_bytes, relaxed=True, time_limit_s=max(self._left_s, 1.0), gap=_NO_GAP
        )
        return max(0.0, solved.solution.bound) * self.model.unit_us

    def add_moments(self, found: Evaluated, budget_bytes: float) -> bool:
        """Give rows to the moments at which a plan is over the budget. Whether there were new ones."""
        new = [m for m in _worst(found, budget_bytes) if m not in self.model.corrections]
        self.model.corrections.update(dict.fromkeys(new[:_MOST_NEW_ROWS], 0.0))
        return bool(new)

    def _propose(self, budget_bytes: float) -> Solved | None:
        if self.is_late:
            return None
        solved = self.model.fastest(budget_bytes, time_limit_s=self._share_s, gap=self._gap)
        if solved.is_bound:
            bound = inf if solved.solution.is_infeasible else solved.solution.bound
            self.bound_us = max(self.bound_us, bound * self.model.unit_us)
        if solved.solution.values is not None:
            return solved
        if not self._is_corrected or not solved.solution.is_infeasible:
            return None
        self._scale_corrections(0.5)
        return self._propose(budget_bytes)

    def _is_good(self, best: Evaluated | None) -> bool:
        return best is not None and best.recompute_us <= self.bound_us * (1 + self._gap)

    @property
    def _most_rounds(self) -> int:
        if self.is_exhaustive:
            return _MOST_ROUNDS_OF_FEW
        return _MOST_ROUNDS if len(self.model.needs.storages) <= _MANY_DECISIONS else 0

    def _learn(self, solved: Solved, found: Evaluated, budget_bytes: float) -> None:
        """Make the program see why this plan does not fit."""
        is_new = self.add_moments(found, budget_bytes)
        if self.is_exhaustive:
            if not is_new:
                self.model.excluded.append((found.keep, found.decided))
            return
        for moment in _worst(found, budget_bytes):
            missed = found.live_bytes[moment] - solved.live_bytes.get(moment, inf)
            if missed > 0:
                self.model.corrections[moment] = missed
        if found.keep in self._seen:
            self.model.excluded.append((found.keep, found.decided))
        self._seen.add(found.keep)

    def _loosen(self, solved: Solved, found: Evaluated) -> bool:
        """Lower corrections to what the rows miss for a plan that fits. Whether the next plan can be faster."""
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

    def _bound_time(self, budget_bytes: float) -> None:
        solved = self.model.fastest(
            budget_bytes, relaxed=True, time_limit_s=max(self._left_s, 2.0), gap=_NO_GAP
        )
        if solved.solution.values is not None:
            self.bound_us = max(self.bound_us, solved.solution.bound * self.model.unit_us)

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
        return self.deadline_s - time.perf_counter()

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return self._left_s <= 0

    @property
    def _share_s(self) -> float:
        """How long one program may be solved."""
        return max(0.1, self._left_s / 4)


def _worst(found: Evaluated, budget_bytes: float) -> Sequence[Moment]:
    """Where a plan is over the budget: of each run of such moments the highest; the worst first."""
    runs: list[list[tuple[int, Moment]]] = [[]]
    for moment, nbytes in found.live_bytes.items():
        if nbytes > budget_bytes:
            runs[-1].append((nbytes, moment))
        elif runs[-1]:
            runs.append([])
    highest: Iterable[tuple[int, Moment]] = sorted((max(run) for run in runs if run), reverse=True)
    return [moment for _, moment in highest]
