"""A linear program of all plans: storages that are kept, operations that are recomputed, and the live bytes at moments.

A storage that is needed after a moment is live then, or recomputed after it; and the inputs of every operation that is
recomputed after it are needed in the same way. An operation is recomputed at most once: a result that it made before
the moment, and that is needed after it, is live. At one moment, the live storages and the operations that run later are
a cut through the graph, so without the row for memory the program's vertices are integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import MappingProxyType

from thunder_memsave.planner.choices import NEVER
from thunder_memsave.planner.effort import NEAR_RELAXED
from thunder_memsave.planner.linear.coverage import add_coverage
from thunder_memsave.planner.linear.model import Model, Moment
from thunder_memsave.planner.linear.program import LinearProgram, Solution
from thunder_memsave.planner.work import Work

MayPrecede = Callable[[int, int], bool]
"""Tells whether an operation of forward may be recomputed before backward is past a position."""

_Terms = list[tuple[int, float]]


def backward_moment(moment: Moment) -> Moment:
    """Return the moment itself, or for a recomputation the operation of backward after it."""
    return moment if moment.phase == "forward" else Moment("backward", moment.position)


class MomentProgram:
    """Variables for kept storages and recomputed operations, and, at each moment, for live storages and later steps."""

    def __init__(
        self,
        model: Model,
        budget_bytes: float | None,
        *,
        may_precede: MayPrecede | None = None,
        integer: bool = False,
        decided: Mapping[int, float] = MappingProxyType({}),
    ) -> None:
        """Build the program without moments.

        Args:
            model: Provides needs, costs and pins.
            budget_bytes: Bytes for the whole step; None: minimise the peak, and ignore time.
            may_precede: Leaves out plans in which other operations are recomputed before a moment, and most variables
                with them; None: covers all plans.
            integer: True for an integer program, False for its relaxation.
            decided: Storages that are kept (1) or not (0) in every solution.
        """
        self._model, self._needs, self._program = model, model.needs, LinearProgram()
        self._may_precede, self._integer, self._decided = may_precede, integer, decided
        per_us = 0.0 if budget_bytes is None else 1.0 / model.unit_us
        self._again = {
            o: self._program.variable(cost=model.costs_us[o] * per_us) for o in self._needs.ops
        }
        self._kept = {s: self._keep_variable(s) for s in self._needs.storages}
        add_coverage(self._program, self._needs, self._kept, self._again)
        self._budget = 0.0 if budget_bytes is None else budget_bytes / model.unit_bytes
        self._peak = self._program.variable(cost=1.0, high=inf) if budget_bytes is None else None

    def count(self, moment: Moment, *, correction_bytes: float = 0.0) -> None:
        """Limit the live bytes at a moment by the budget, or by the peak to minimise.

        Args:
            moment: A moment of forward or backward, not of a recomputation.
            correction_bytes: Live bytes that the row itself does not count.
        """
        constants, position = self._model.always_live, moment.position
        if moment.phase == "forward":
            constant = float(constants.forward[position])
            self._limit(self._kept_before(position), constant + correction_bytes)
        else:
            constant = float(constants.backward[position])
            self._limit(self._live_at(position), constant + correction_bytes)

    def solve(self, work: Work, *, gap: float = 1e-9) -> Solution:
        """Minimise the recompute time, or the peak, in the model's units."""
        if self._integer:
            return self._program.solve_near(work, part=NEAR_RELAXED, gap=gap)
        return self._program.relaxed(work)

    def keep(self, solution: Solution) -> frozenset[int]:
        """Return the storages that a solution keeps."""
        assert solution.values is not None
        return frozenset(s for s, v in self._kept.items() if solution.values[v] > 0.5)

    def _keep_variable(self, storage: int) -> int:
        pin = self._model.pinned.get(storage)
        must = pin or (storage in self._needs.must_keep and storage in self._needs.first)
        low, high = float(bool(must)), 0.0 if pin is False else 1.0
        if storage in self._decided:
            low = high = self._decided[storage]
        return self._program.variable(low=low, high=high, integer=self._integer)

    def _limit(self, terms: _Terms, constant_bytes: float) -> None:
        most = self._budget - constant_bytes / self._model.unit_bytes
        peak = [] if self._peak is None else [(self._peak, -1.0)]
        self._program.row([*terms, *peak], most=most)

    def _kept_before(self, position: int) -> _Terms:
        """Return the bytes kept for backward when forward is at a position."""
        last = self._needs.last_in_forward
        kept = [(v, self._units(s)) for s, v in self._kept.items() if last[s] < position]
        return kept + [(self._again[o], units) for o, units in self._states() if o < position]

    def _live_at(self, position: int) -> _Terms:
        """Return the bytes live while backward is at a position, without those that are live in every plan."""
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
        """Yield the storages that are live at a position in some plans only."""
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
        """Return the variable of a storage being live: that of being kept, if it is neither made nor freed before."""
        needs, maker = self._needs, self._maker(storage)
        waits = needs.first.get(storage, -1) > position or all(
            o in after and o not in split for o in needs.readers(storage)
        )
        if self._may_precede and waits and maker not in split:
            return self._kept[storage]
        return self._program.variable()

    def _run_before(self, position: int, after: dict[int, int], split: set[int]) -> None:
        """Require the inputs of backward, and of operations that were recomputed by the moment."""
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
        """Require that a storage was kept, or recomputed before the moment."""
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
        """Require that a storage is live, or recomputed after the moment."""
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
        """Tell whether any result of the operation can be needed after the moment."""
        needs = self._needs
        return any(needs.first.get(s, needs.latest.get(s, -1)) > position for s in needs.makes[op])

    def _can_precede(self, op: int, position: int) -> bool:
        return self._may_precede is None or self._may_precede(op, position)

    def _states(self) -> _Terms:
        """Return the generator states kept for random operations that are recomputed."""
        units = self._model.generator_state_bytes / self._model.unit_bytes
        ops = self._needs.graph.ops
        return [(o, units) for o in self._again if ops[o].repeat == "replay"]

    def _units(self, storage: int) -> float:
        """Return the size, where a plan decides whether the storage is there: one on the host is not."""
        if storage in self._model.offloaded:
            return 0.0
        return self._needs.graph.storages[storage].nbytes / self._model.unit_bytes
