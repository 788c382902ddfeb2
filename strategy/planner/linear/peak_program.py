"""Models the peak of all plans at once, as rows of a linear program that are added where they bind.

A plan decides for each storage whether forward keeps it. A row counts the live bytes at one moment: storages that are
kept and not yet read, storages that were recomputed by then and are still to be read, and storages that are live in
every plan. Without corrections every row is a relaxation: it counts nothing that is not live, so the program's optimum
bounds all plans. The exact simulation of a plan that the program finds says which moments were missed; the correction
of a row is the bytes that it missed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import NEVER, Needs
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.linear.coverage import add_coverage
from thunder_memsave.planner.linear.program import LinearProgram, Solution
from thunder_memsave.planner.order import order
from thunder_memsave.planner.simulate import simulate

_MOST_FOLLOWED = 96
"""Most operations that are followed back from the results that were recomputed by a moment. Operations beyond may have
freed storages that the row counts, so that such a row bounds nothing."""


class Moment(NamedTuple):
    """A moment at which memory is counted."""

    phase: Literal["forward", "backward", "again"]
    position: int
    """Index of the operation in forward or in backward; the number of forward's operations: while the caller has a
    loss."""
    op: int = -1
    """The operation of forward that is recomputed before the operation of backward at `position`, for `again`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The memory that is live at a moment, in units of the program."""

    terms: tuple[tuple[int, float], ...]
    constant: float


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A plan that the program found, and the live bytes by its rows."""

    solution: Solution
    keep: frozenset[int]
    live_bytes: Mapping[Moment, float]
    is_bound: bool
    """True if the program's bound holds for all plans."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Limits at which the solver stops."""

    gap: float
    """Relative gap between the solution and its bound."""
    most_nodes: int | None = None
    """Nodes of the search tree; None: no limit."""
    time_limit_s: float
    """Wall-clock seconds."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of memory, in place of a budget."""

    peak_us_per_byte: float
    """Price of the peak, the largest row."""
    kept_us_per_byte: float
    """Price of storages that are kept for backward."""


@dataclass(kw_only=True)
class PeakModel:
    """The plans of a graph as a linear program, with rows for the moments that were found to bind."""

    needs: Needs
    costs_us: Sequence[float]
    memory: StepMemory
    generator_state_bytes: int
    pinned: Mapping[int, bool] = field(default_factory=dict)
    """Storages that are kept (True) or not kept (False) in every plan."""
    corrections: dict[Moment, float] = field(default_factory=dict)
    """Bytes to add to each row; the keys are the moments that have a row."""
    excluded: list[tuple[frozenset[int], frozenset[int]]] = field(default_factory=list)
    """Plans that were found not to fit: the kept storages, and all storages that the plan decides."""
    constants: Constants | None = None
    """Bytes live in every plan of the whole graph, if this graph is a part of it."""

    def __post_init__(self) -> None:
        self.always_live = self.constants or live_anyway(self.needs, self.memory)
        self._early = _EarlyReads(self.needs)
        self.unit_bytes = max(1.0, self.always_live.largest / 4096)
        self.unit_us = max(1e-9, sum(self.costs_us[o] for o in self.needs.ops) / 1024)
        self._earliest_op = {
            o: min((self.needs.earliest[s] for s in self.needs.makes[o]), default=NEVER)
            for o in self.needs.ops
        }

    def fastest(self, budget_bytes: float, effort: Effort, *, relaxed: bool = False) -> Solved:
        """Minimise the time within a budget, as far as the rows say. A relaxed program has no corrections."""
        built = _Built(self, budget_bytes=budget_bytes, is_relaxed=relaxed)
        return built.solve(effort, relaxed=relaxed)

    def smallest(self, effort: Effort, *, relaxed: bool = False) -> Solved:
        """Minimise the peak, as far as the rows say. The solution's cost is the peak in units."""
        built = _Built(self, budget_bytes=None, is_relaxed=relaxed)
        return built.solve(effort, relaxed=relaxed)

    def cheapest(self, prices: Prices, effort: Effort, *, relaxed: bool = False) -> Solved:
        """Minimise the time plus the price of memory. The solution's cost is in units of time."""
        built = _Built(self, budget_bytes=None, is_relaxed=True, prices=prices)
        return built.solve(effort, relaxed=relaxed)


@dataclass(frozen=True)
class Constants:
    """Bytes live in every plan: during each operation of forward and after it, before and during those of backward."""

    forward: np.ndarray
    before: np.ndarray
    during: np.ndarray
    largest: float


def live_anyway(needs: Needs, memory: StepMemory) -> Constants:
    """Find the bytes that are live in every plan."""
    graph = needs.graph
    actions = keeping(graph.storages[s].name for s in needs.first)
    profile = simulate(order(graph, actions), memory)
    during = np.array(profile.step_peak_bytes, dtype=float)
    live = np.array(profile.live_bytes[:-1], dtype=float)
    forward, backward = np.split(during, [graph.num_forward])
    forward = np.append(forward, float(profile.between_peak_bytes))
    before = live[graph.num_forward :]
    for storage, first in needs.first.items():
        nbytes = graph.storages[storage].nbytes
        forward[needs.last_in_forward[storage] + 1 :] -= nbytes
        backward[:first] -= nbytes
        before[: first + 1] -= nbytes
    return Constants(forward, before, backward, float(profile.peak_bytes))


class _EarlyReads:
    """Storages that a recomputation of another one reads before backward itself does."""

    def __init__(self, needs: Needs) -> None:
        self.matters_until = matters = _matters_until(needs)
        found = []
        for op in needs.ops:
            runs = min((needs.first.get(s, NEVER) for s in needs.makes[op]), default=NEVER)
            found += [(runs, matters[s], s, op) for s in needs.inputs[op] if runs < matters[s]]
        found.sort(reverse=True)
        self._reads = found
        self._runs = np.array([f[0] for f in found], dtype=np.int64)
        self._until = np.array([f[1] for f in found], dtype=np.int64)

    def at(self, position: int) -> list[tuple[int, int]]:
        """Return storages and the operations that may have read them by a position, the latest first."""
        if not self._reads:
            return []
        found = np.flatnonzero((self._runs <= position) & (position < self._until))
        return [self._reads[i][2:] for i in found]


def _matters_until(needs: Needs) -> dict[int, int]:
    """Return the last position at which it matters whether each storage was recomputed early.

    That is where backward first reads it, or else the last position at which it or a storage it depends on is read.
    """
    until: dict[int, int] = {}
    for storage in needs.storages:
        inputs = needs.inputs.get(needs.producer[storage], ())
        behind = max((until[s] for s in inputs), default=-1)
        until[storage] = needs.first.get(storage, max(behind, needs.latest.get(storage, -1)))
    return until


@dataclass
class _Early:
    """Variables of operations that were recomputed by a position of backward."""

    ran: dict[int, int] = field(default_factory=dict)
    is_complete: bool = True


class _Built:
    """One linear program."""

    def __init__(
        self,
        model: PeakModel,
        *,
        budget_bytes: float | None,
        is_relaxed: bool,
        prices: Prices | None = None,
    ) -> None:
        self._is_relaxed, self.is_complete = is_relaxed, True
        self._model, self._needs = model, model.needs
        self._graph: TrainingGraph = model.needs.graph
        self._program = LinearProgram()
        self._is_smallest = budget_bytes is None
        per_us = (1e-6 if self._is_smallest and prices is None else 1.0) / model.unit_us
        needs = self._needs
        self._again = {
            o: self._program.variable(cost=model.costs_us[o] * per_us) for o in needs.ops
        }
        self._kept = {s: self._keep_variable(s) for s in needs.storages}
        add_coverage(self._program, needs, self._kept, self._again)
        self._early: dict[int, _Early] = {}
        self._peak = self._program.variable(cost=1.0, high=np.inf) if budget_bytes is None else None
        if prices is not None:
            self._price(prices)
        self._rows = dict(self._all_rows())
        for moment, row in self._rows.items():
            self._limit(moment, row, budget_bytes)
        for keep, decided in model.excluded:
            self._exclude(keep, decided)

    def solve(self, effort: Effort, *, relaxed: bool) -> Solved:
        solution = self._program.solve(
            relaxed=relaxed,
            time_limit_s=effort.time_limit_s,
            gap=effort.gap,
            most_nodes=effort.most_nodes,
        )
        x = solution.values
        if x is None:
            return self._solved(solution, frozenset(), {})
        live = {
            moment: (row.constant + sum(f * x[v] for v, f in row.terms)) * self._model.unit_bytes
            for moment, row in self._rows.items()
        }
        keep = frozenset(s for s, v in self._kept.items() if x[v] > 0.5)
        return self._solved(solution, keep, live)

    def _solved(
        self, solution: Solution, keep: frozenset[int], live: Mapping[Moment, float]
    ) -> Solved:
        is_corrected = any(self._model.corrections.values())
        return Solved(
            solution=solution,
            keep=keep,
            live_bytes=live,
            is_bound=self.is_complete and (self._is_relaxed or not is_corrected),
        )

    def _price(self, prices: Prices) -> None:
        """Add the prices of memory to the cost."""
        program, unit_us = self._program, self._model.unit_us
        assert self._peak is not None
        program.cost[self._peak] = prices.peak_us_per_byte * self._model.unit_bytes / unit_us
        us_per_unit = prices.kept_us_per_byte * self._model.unit_bytes / unit_us
        for storage, kept in self._kept.items():
            program.cost[kept] += us_per_unit * self._units(storage)

    def _keep_variable(self, storage: int) -> int:
        pin = self._model.pinned.get(storage)
        must = pin or (storage in self._needs.must_keep and storage in self._needs.first)
        return self._program.variable(
            low=1.0 if must else 0.0, high=0.0 if pin is False else 1.0, integer=True
        )

    def _limit(self, moment: Moment, row: Row, budget_bytes: float | None) -> None:
        correction = 0.0 if self._is_relaxed else self._model.corrections[moment]
        constant = row.constant + correction / self._model.unit_bytes
        if self._peak is not None:
            self._program.row([*row.terms, (self._peak, -1.0)], most=-constant)
        elif budget_bytes is not None:
            most = budget_bytes / self._model.unit_bytes - constant
            self._program.row(row.terms, most=most)

    def _exclude(self, keep: Set[int], decided: Set[int]) -> None:
        """Require that at least one decided storage is decided otherwise."""
        terms = [(v, -1.0 if s in keep else 1.0) for s, v in self._kept.items() if s in decided]
        self._program.row(terms, least=1.0 - len(keep))

    def _all_rows(self) -> Iterable[tuple[Moment, Row]]:
        moments = self._model.corrections
        until = self._kept_until([m for m in moments if m.phase != "forward"])
        upto = self._kept_after([m.position for m in moments if m.phase == "forward"])
        for moment in moments:
            if moment.phase == "forward":
                constant = self._model.always_live.forward[moment.position]
                yield moment, self._row(constant, [(upto[moment.position], 1.0)])
            elif moment.phase == "backward":
                yield moment, self._backward_row(moment, until[_time(moment)])
            else:
                yield moment, self._again_row(moment, until[_time(moment)])

    def _row(self, constant_bytes: float, terms: Iterable[tuple[int, float]]) -> Row:
        return Row(terms=tuple(terms), constant=constant_bytes / self._model.unit_bytes)

    def _units(self, storage: int) -> float:
        return self._graph.storages[storage].nbytes / self._model.unit_bytes

    def _kept_until(self, moments: Sequence[Moment]) -> dict[int, int]:
        """Return variables by time: units kept and not read before. Each adds to the next one's, so rows stay short."""
        read = [(2 * self._needs.waits_until(s), v, self._units(s)) for s, v in self._kept.items()]
        state = self._model.generator_state_bytes / self._model.unit_bytes
        read += [
            (2 * self._model._earliest_op[o], v, state)
            for o, v in self._again.items()
            if self._graph.ops[o].repeat == "replay"
        ]
        times = sorted({_time(m) for m in moments}, reverse=True)
        # A storage read before p (2p) or by the operation at p (2p + 1) is not counted by the operation at p itself.
        return self._sums(sorted(read, reverse=True), times, lambda at, time: at >= time)

    def _kept_after(self, positions: Sequence[int]) -> dict[int, int]:
        """Return variables by position in forward: units that are live only because they are kept."""
        read = [(self._needs.last_in_forward[s], v, self._units(s)) for s, v in self._kept.items()]
        state = self._model.generator_state_bytes / self._model.unit_bytes
        read += [
            (o, v, state) for o, v in self._again.items() if self._graph.ops[o].repeat == "replay"
        ]
        return self._sums(sorted(read), sorted(set(positions)), lambda at, time: at < time)

    def _sums(
        self,
        read: Sequence[tuple[int, int, float]],
        times: Sequence[int],
        counts: Callable[[int, int], bool],
    ) -> dict[int, int]:
        sums: dict[int, int] = {}
        previous, start = None, 0
        for time in times:
            end = start
            while end < len(read) and counts(read[end][0], time):
                end += 1
            total = self._program.variable(high=np.inf)
            terms = [(v, f) for _, v, f in read[start:end]] + [(total, -1.0)]
            if previous is not None:
                terms.append((previous, 1.0))
            self._program.row(terms, least=0.0, most=0.0)
            sums[time], previous, start = total, total, end
        return sums

    def _backward_row(self, moment: Moment, kept: int) -> Row:
        early = self._early_at(moment.position)
        terms = [(kept, 1.0)]
        for op in early.ran:
            terms += self._made_early(op, early, moment.position)
        terms += self._read_early({moment.position: None}, moment.position)
        return self._row(self._model.always_live.during[moment.position], terms)

    def _again_row(self, moment: Moment, kept: int) -> Row:
        """Return the memory live while an operation of forward is recomputed; valid also in plans that keep it."""
        here, op = moment.position, moment.op
        early, before = self._early_at(here), self._early_at(here - 1)
        terms, constant = [(kept, 1.0)], self._model.always_live.before[here]
        for other in sorted(early.ran.keys() | before.ran.keys()):
            source = early if other in early.ran and other < op else before
            if other in source.ran:
                terms += self._made_early(other, source, here if other < op else here - 1)
        for storage in self._needs.read_first_at(here):
            if self._needs.producer[storage] < op and storage not in self._needs.must_keep:
                terms.append((self._kept[storage], -self._units(storage)))
                constant += self._graph.storages[storage].nbytes
        terms += self._read_early({here: op, here - 1: None}, here - 1)
        runs = self._runs_at(op, here, early, before)
        if runs is not None:
            terms += self._inside(op, here, runs)
        return self._row(constant, terms)

    def _runs_at(self, op: int, position: int, early: _Early, before: _Early) -> int | None:
        """Return the variable of an operation being recomputed exactly at this position; None if it cannot be told."""
        if not before.is_complete:
            return None
        runs = self._program.variable()
        ran = [(before.ran[op], 1.0)] if op in before.ran else []
        if op in early.ran:
            self._program.row([(runs, 1.0), (early.ran[op], -1.0), *ran], least=0.0)
        for storage in self._needs.makes[op]:
            if self._needs.first.get(storage) == position:
                self._program.row([(runs, 1.0), (self._kept[storage], 1.0), *ran], least=1.0)
        return runs

    def _inside(self, op: int, position: int, runs: int) -> Iterable[tuple[int, float]]:
        """Yield the memory that an operation takes while it is recomputed, its inputs included."""
        yield runs, self._graph.ops[op].peak_bytes / self._model.unit_bytes
        for storage in self._needs.inputs[op]:
            first, last = self._needs.first.get(storage), self._needs.last.get(storage, -1)
            if first is not None and (first >= position or last >= position):
                continue  # counted
            if self._needs.waits_until(storage) < position:
                yield runs, self._units(storage)
            else:
                there = self._program.variable()
                self._program.row(
                    [(there, 1.0), (runs, -1.0), (self._kept[storage], 1.0)], least=0.0
                )
                yield there, self._units(storage)

    def _made_early(self, op: int, early: _Early, position: int) -> Iterable[tuple[int, float]]:
        """Return the results that an operation has recomputed by a position and that backward reads later."""
        later = [s for s in self._needs.makes[op] if self._needs.first.get(s, -1) > position]
        if len(self._needs.makes[op]) == 1:
            return [(early.ran[op], self._units(s)) for s in later]
        terms = []
        for storage in later:
            there = self._program.variable()
            self._program.row(
                [(there, 1.0), (early.ran[op], -1.0), (self._kept[storage], 1.0)], least=0.0
            )
            terms.append((there, self._units(storage)))
        return terms

    def _read_early(
        self, by: Mapping[int, int | None], position: int
    ) -> Iterable[tuple[int, float]]:
        """Subtract storages that were kept only to recompute others, all of which ran by a position, before an op."""
        reasons: dict[int, dict[tuple[int, int], None]] = {}
        for at, op in by.items():
            for reader in self._may_have_run(at):
                if op is None or reader < op:
                    for storage in self._needs.inputs[reader]:
                        if (
                            storage not in self._needs.first
                            and self._needs.latest[storage] > position
                        ):
                            reasons.setdefault(storage, {})[at, reader] = None
        for storage, readers in reasons.items():
            released = self._program.variable()
            self._program.row([(released, 1.0), (self._kept[storage], -1.0)], most=0.0)
            ran = [self._ran_terms(reader, at) for at, reader in readers]
            terms = [(v, -f) for found, _ in ran for v, f in found]
            self._program.row([(released, 1.0), *terms], most=float(sum(c for _, c in ran)))
            yield released, -self._units(storage)

    def _may_have_run(self, position: int) -> Iterable[int]:
        early = self._early_at(position)
        return dict.fromkeys([*early.ran, *(r for _, r in self._model._early.at(position))])

    def _ran_terms(self, op: int, position: int) -> tuple[list[tuple[int, float]], float]:
        """Return terms and a constant that are at least 1 if the operation was recomputed by a position."""
        early = self._early_at(position)
        if op in early.ran:
            return [(early.ran[op], 1.0)], 0.0
        made = [s for s in self._needs.makes[op] if self._needs.first.get(s, NEVER) <= position]
        return [(self._kept[s], -1.0) for s in made], float(len(made))

    def _early_at(self, position: int) -> _Early:
        if position not in self._early:
            self._early[position] = self._follow(position)
            self._bound(self._early[position], position)
        return self._early[position]

    def _follow(self, position: int) -> _Early:
        """Require that operations were recomputed by `position` if something that ran by then needs them."""
        early = _Early()
        queue: list[int] = []
        for storage, reader in self._model._early.at(position):
            for made in self._needs.makes[reader]:
                if self._needs.first.get(made, NEVER) <= position:
                    self._need(storage, early, queue, (self._kept[made], 1.0), least=1.0)
        for op in queue:
            self._program.row([(self._again[op], 1.0), (early.ran[op], -1.0)], least=0.0)
            for storage in self._needs.inputs[op]:
                if self._model._early.matters_until[storage] > position:
                    self._need(storage, early, queue, (early.ran[op], -1.0), least=0.0)
            for made in self._needs.makes[op]:
                if self._needs.first.get(made, NEVER) <= position:
                    self._program.row([(early.ran[op], 1.0), (self._kept[made], 1.0)], least=1.0)
        self.is_complete &= early.is_complete
        return early

    def _need(
        self,
        storage: int,
        early: _Early,
        queue: list[int],
        reader: tuple[int, float],
        *,
        least: float,
    ) -> None:
        """Require, if the reader has run, that the storage is kept or its producer has run too."""
        op = self._needs.producer[storage]
        if storage in self._needs.must_keep or op not in self._again:
            return
        terms = [reader, (self._kept[storage], 1.0)]
        if op in early.ran or len(early.ran) < _MOST_FOLLOWED:
            if op not in early.ran:
                early.ran[op] = self._program.variable()
                queue.append(op)
            self._program.row([*terms, (early.ran[op], 1.0)], least=least)
            return
        early.is_complete = False
        if not self._is_relaxed:
            # Plans recompute so much at once only if they have to, so here the storage has to be kept.
            self._program.row(terms, least=least)

    def _bound(self, early: _Early, position: int) -> None:
        """Require that no operation was recomputed by `position` unless something needed it."""
        if self._is_relaxed and not early.is_complete:
            return
        for op, ran in early.ran.items():
            if len(self._needs.makes[op]) > 1:
                continue  # readers of results that do not matter here are not followed
            terms, most = [(ran, 1.0)], 0.0
            for storage in self._needs.makes[op]:
                if self._needs.first.get(storage, NEVER) <= position:
                    terms.append((self._kept[storage], 1.0))
                    most += 1.0
                for reader in self._needs.readers(storage):
                    if reader in early.ran:
                        terms.append((early.ran[reader], -1.0))
                        continue
                    for made in self._needs.makes[reader]:
                        if self._needs.first.get(made, NEVER) <= position:
                            terms.append((self._kept[made], 1.0))
                            most += 1.0
            self._program.row(terms, most=most)


def _time(moment: Moment) -> int:
    """Return an even number before the operation of backward at a position, an odd one during it."""
    return 2 * moment.position + (moment.phase == "backward")
