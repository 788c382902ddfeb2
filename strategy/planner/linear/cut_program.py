"""A linear program of all plans: what is kept, what runs again, and what is live at some moments of a step.

What is needed after a moment is live then, or computed again after it; and whatever is computed again after it needs
its own inputs in the same way. An operation runs again once at most: what it made before the moment and is needed
after it is live. At one moment, storages that are live and operations that run later are a cut through the graph, so
but for the row of memory the program's vertices are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import MappingProxyType

from thunder_memsave.planner.choices import NEVER
from thunder_memsave.planner.linear.coverage import add_coverage
from thunder_memsave.planner.linear.peak_program import Moment, PeakModel
from thunder_memsave.planner.linear.program import LinearProgram, Solution

MayPrecede = Callable[[int, int], bool]
"""Whether an operation of forward may run again before backward is past a position."""

_NEAR = 1e-3
"""Of the cost: what is farther from a solution with fractions is not looked at for one without."""
_Terms = list[tuple[int, float]]


def backward_moment(moment: Moment) -> Moment:
    """Of computing again, the operation of backward after it."""
    return moment if moment.phase == "forward" else Moment("backward", moment.position)


class MomentProgram:
    """What is kept and what runs again, and at each moment what is live and what runs after it."""

    def __init__(
        self,
        model: PeakModel,
        budget_bytes: float | None,
        *,
        may_precede: MayPrecede | None = None,
        whole: bool = False,
        decided: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Make the program without moments.

        Args:
            model: For its needs, costs and pins.
            budget_bytes: Of the whole step; None: the peak is made least, and time does not count.
            may_precede: Leaves out plans in which other operations run again before a moment, and most variables with
                them; None: all plans are there.
            whole: Whether storages are kept or not, with nothing in between.
            decided: Storages that are kept (1), or not (0), whatever follows.
        """
        self._model, self._needs, self._program = model, model.needs, LinearProgram()
        self._may_precede, self._whole, self._decided = may_precede, whole, decided
        per_us = 0.0 if budget_bytes is None else 1.0 / model.unit_us
        self._again = {
            o: self._program.variable(cost=model.costs_us[o] * per_us) for o in self._needs.ops
        }
        self._kept = {s: self._keep_variable(s) for s in self._needs.storages}
        add_coverage(self._program, self._needs, self._kept, self._again)
        self._budget = 0.0 if budget_bytes is None else budget_bytes / model.unit_bytes
        self._peak = self._program.variable(cost=1.0, high=inf) if budget_bytes is None else None

    def count(self, moment: Moment, *, correction_bytes: float = 0.0) -> None:
        """Limit what is live at a moment by the budget, or by the peak that is made least.

        Args:
            moment: Not of computing again.
            correction_bytes: Live beside what the row says.
        """
        constants, position = self._model.always_live, moment.position
        if moment.phase == "forward":
            constant = float(constants.forward[position])
            self._limit(self._kept_before(position), constant + correction_bytes)
        else:
            constant = float(constants.during[position])
            self._limit(self._live_at(position), constant + correction_bytes)

    def solve(self, *, time_limit_s: float, gap: float = 1e-9) -> Solution:
        """Costs are of the time, or of the peak, in the model's units."""
        if self._whole:
            return self._program.solve_near(_NEAR, time_limit_s=time_limit_s, gap=gap)
        return self._program.solve(relaxed=True, time_limit_s=time_limit_s, gap=gap)

    def keep(self, solution: Solution) -> frozenset[int]:
        """Storages that a solution keeps."""
        assert solution.values is not None
        return frozenset(s for s, v in self._kept.items() if solution.values[v] > 0.5)

    def _keep_variable(self, storage: int) -> int:
        pin = self._model.pinned.get(storage)
        must = pin or (storage in self._needs.must_keep and storage in self._needs.first)
        low, high = float(bool(must)), 0.0 if pin is False else 1.0
        if storage in self._decided:
            low = high = self._decided[storage]
        return self._program.variable(low=low, high=high, whole=self._whole)

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
        after = {
            o: self._program.variable() if self._can_precede(o, position) else again
            for o, again in self._again.items()
            if self._may_follow(o, position)
        }
        split = {o for o, variable in after.items() if variable != self._again[o]}
        live = {s: self._live(s, position, split, after) for s in self._varying(position, after)}
        self._run_before(position, after, split)
        for storage, variable in live.items():
            if variable != self._kept[storage]:
                self._there(storage, after, [(variable, -1.0)], least=0.0)
                if self._needs.first.get(storage, -1) > position:
                    self._needed_after(storage, after, live, [], least=1.0)
        for op, variable in after.items():
            if op in split:
                self._program.row([(self._again[op], 1.0), (variable, -1.0)], least=0.0)
            for storage in self._needs.inputs[op]:
                if live.get(storage, self._kept[storage]) != self._kept[storage]:
                    self._needed_after(storage, after, live, [(variable, -1.0)], least=0.0)
        states = [(after[o], units) for o, units in self._states() if o in after]
        return [(v, self._units(s)) for s, v in live.items()] + states

    def _varying(self, position: int, after: dict[int, int]) -> Iterable[int]:
        """Storages that are live at a position in some plans only."""
        needs = self._needs
        for storage in needs.storages:
            first = needs.first.get(storage, NEVER)
            if first <= position <= needs.last.get(storage, -1):
                continue
            if self._may_precede and first <= position and not self._is_read(storage, after):
                continue
            yield storage

    def _is_read(self, storage: int, after: dict[int, int]) -> bool:
        return any(o in after for o in self._needs.readers(storage))

    def _live(self, storage: int, position: int, split: set[int], after: dict[int, int]) -> int:
        """A variable: that it is kept, where nothing makes it before the moment, nor needs it for the last time."""
        needs, maker = self._needs, self._maker(storage)
        waits = needs.first.get(storage, -1) > position or all(
            o in after and o not in split for o in needs.readers(storage)
        )
        if self._may_precede and waits and maker not in split:
            return self._kept[storage]
        return self._program.variable()

    def _run_before(self, position: int, after: dict[int, int], split: set[int]) -> None:
        """What has run again by the moment had its inputs, and so had backward."""
        for storage, first in self._needs.first.items():
            if first <= position and self._maker(storage) in after:
                self._there(storage, after, [], least=1.0)
        for op in self._again:
            if op in after and op not in split:
                continue
            less = [(v, -f) for v, f in self._before(op, after)]
            for storage in self._needs.inputs[op]:
                if op in after or self._maker(storage) in after:
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
        if after.get(op) == self._again[op]:
            return []
        return [(self._again[op], 1.0), *([(after[op], -1.0)] if op in after else [])]

    def _maker(self, storage: int) -> int | None:
        op = self._needs.producer[storage]
        return None if storage in self._needs.must_keep or op not in self._again else op

    def _may_follow(self, op: int, position: int) -> bool:
        """Whether there is a reason to run it again after the moment."""
        needs = self._needs
        return any(needs.first.get(s, needs.latest.get(s, -1)) > position for s in needs.makes[op])

    def _can_precede(self, op: int, position: int) -> bool:
        return self._may_precede is None or self._may_precede(op, position)

    def _states(self) -> _Terms:
        """Generator states that wait for operations that run again."""
        units = self._model.generator_state_bytes / self._model.unit_bytes
        ops = self._needs.graph.ops
        return [(o, units) for o in self._again if ops[o].repeat == "replay"]

    def _units(self, storage: int) -> float:
        return self._needs.graph.storages[storage].nbytes / self._model.unit_bytes
