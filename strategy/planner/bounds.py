"""Bounds the time and the memory of all plans by what must be live at single moments.

What is needed after a moment is live then, or computed again after it; and whatever is computed again after it needs
its own inputs in the same way. An operation runs again once at most: what it made before the moment and is needed
after it is live. At one moment, storages that are live and operations that run later are a cut through the graph, so
but for the row of memory the program's vertices are whole, and the bound is near where one moment decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from thunder_memsave.planner.coverage import add_coverage
from thunder_memsave.planner.linear import LinearProgram
from thunder_memsave.planner.model import Moment, PeakModel
from thunder_memsave.planner.needs import NEVER

_TIME_LIMIT_S = 60.0
_SAFE = 1 - 1e-6
"""HiGHS takes what is nearly within bounds for within."""

_Terms = list[tuple[int, float]]


def least_us(model: PeakModel, budget_bytes: float, moments: Sequence[Moment]) -> float:
    """No plan within a budget takes less time; infinite where no plan is within it.

    Args:
        model: For its needs, costs and pins.
        budget_bytes: Of the whole step.
        moments: At which memory is counted; those of computing again count as the operation of backward after it.
    """
    program = _Program(model, budget_bytes)
    for moment in dict.fromkeys(map(_without_again, moments)):
        program.count(moment)
    return program.least() * model.unit_us


def least_bytes(model: PeakModel, moments: Sequence[Moment]) -> float:
    """No plan has a smaller peak.

    Args:
        model: For its needs and pins.
        moments: As for `least_us`.
    """
    program = _Program(model, None)
    for moment in dict.fromkeys(map(_without_again, moments)):
        program.count(moment)
    return program.least() * model.unit_bytes


def _without_again(moment: Moment) -> Moment:
    return moment if moment.phase == "forward" else Moment("backward", moment.position)


class _Program:
    """What is kept and what runs again, and at each moment what is live and what runs after it."""

    def __init__(self, model: PeakModel, budget_bytes: float | None) -> None:
        self._model, self._needs, self._program = model, model.needs, LinearProgram()
        per_us = 0.0 if budget_bytes is None else 1.0 / model.unit_us
        self._again = {
            o: self._program.variable(cost=model.costs_us[o] * per_us) for o in self._needs.ops
        }
        self._kept = {s: self._keep_variable(s) for s in self._needs.storages}
        add_coverage(self._program, self._needs, self._kept, self._again)
        self._budget = 0.0 if budget_bytes is None else budget_bytes / model.unit_bytes
        self._peak = self._program.variable(cost=1.0, high=inf) if budget_bytes is None else None

    def count(self, moment: Moment) -> None:
        """Limit what is live at a moment by the budget, or by the peak that is made least."""
        constants, position = self._model.always_live, moment.position
        if moment.phase == "forward":
            self._limit(self._kept_before(position), float(constants.forward[position]))
        else:
            self._limit(self._live_at(position), float(constants.during[position]))

    def least(self) -> float:
        """Of the time, or of the peak, in the model's units."""
        solution = self._program.solve(relaxed=True, time_limit_s=_TIME_LIMIT_S)
        return inf if solution.is_infeasible else max(0.0, solution.bound * _SAFE)

    def _keep_variable(self, storage: int) -> int:
        pin = self._model.pinned.get(storage)
        must = pin or (storage in self._needs.must_keep and storage in self._needs.first)
        return self._program.variable(low=float(bool(must)), high=0.0 if pin is False else 1.0)

    def _limit(self, terms: _Terms, constant_bytes: float) -> None:
        most = self._budget - constant_bytes / self._model.unit_bytes
        peak = [] if self._peak is None else [(self._peak, -1.0)]
        self._program.row([*terms, *peak], most=most)

    def _kept_before(self, position: int) -> _Terms:
        """What waits for backward when forward is at a position."""
        last = self._needs.last_in_forward
        kept = [(v, self._units(s)) for s, v in self._kept.items() if last[s] < position]
        return kept + [(self._again[o], units) for o, units in self._states() if o < position]

    def _live_at(self, position: int) -> _Terms:
        """What is live while backward is at a position, of what is not live in any case."""
        after = {o: self._program.variable() for o in self._again if self._may_follow(o, position)}
        live = {
            s: self._program.variable() for s in self._needs.storages if self._varies(s, position)
        }
        self._run_before(position, after)
        for storage, variable in live.items():
            self._there(storage, after, [(variable, -1.0)], least=0.0)
            if self._needs.first.get(storage, -1) > position:
                self._needed_after(storage, after, live, [], least=1.0)
        for op, variable in after.items():
            self._program.row([(self._again[op], 1.0), (variable, -1.0)], least=0.0)
            for storage in self._needs.inputs[op]:
                if storage in live:
                    self._needed_after(storage, after, live, [(variable, -1.0)], least=0.0)
        states = [(after[o], units) for o, units in self._states() if o in after]
        return [(v, self._units(s)) for s, v in live.items()] + states

    def _run_before(self, position: int, after: dict[int, int]) -> None:
        """What has run again by the moment had its inputs, and so had backward."""
        for storage, first in self._needs.first.items():
            if first <= position:
                self._there(storage, after, [], least=1.0)
        for op in self._again:
            less = [(v, -f) for v, f in self._before(op, after)]
            for storage in self._needs.inputs[op]:
                self._there(storage, after, less, least=0.0)

    def _there(self, storage: int, after: dict[int, int], terms: _Terms, *, least: float) -> None:
        """A storage was kept, or made again before the moment."""
        made = self._before(op, after) if (op := self._maker(storage)) is not None else []
        self._program.row([(self._kept[storage], 1.0), *made, *terms], least=least)

    def _needed_after(
        self,
        storage: int,
        after: dict[int, int],
        live: dict[int, int],
        terms: _Terms,
        *,
        least: float,
    ) -> None:
        """A storage is live, or made again after the moment."""
        op = self._maker(storage)
        made = [(after[op], 1.0)] if op is not None and op in after else []
        self._program.row([(live[storage], 1.0), *made, *terms], least=least)

    def _before(self, op: int, after: dict[int, int]) -> _Terms:
        return [(self._again[op], 1.0), *([(after[op], -1.0)] if op in after else [])]

    def _maker(self, storage: int) -> int | None:
        op = self._needs.producer[storage]
        return None if storage in self._needs.must_keep or op not in self._again else op

    def _may_follow(self, op: int, position: int) -> bool:
        """Whether there is a reason to run it again after the moment."""
        needs = self._needs
        return any(needs.first.get(s, needs.latest.get(s, -1)) > position for s in needs.makes[op])

    def _varies(self, storage: int, position: int) -> bool:
        """Whether it can be live without being so under any plan."""
        first = self._needs.first.get(storage, NEVER)
        return not first <= position <= self._needs.last.get(storage, -1)

    def _states(self) -> _Terms:
        """Generator states that wait for operations that run again."""
        units = self._model.generator_state_bytes / self._model.unit_bytes
        ops = self._needs.graph.ops
        return [(o, units) for o in self._again if ops[o].repeat == "replay"]

    def _units(self, storage: int) -> float:
        return self._needs.graph.storages[storage].nbytes / self._model.unit_bytes
