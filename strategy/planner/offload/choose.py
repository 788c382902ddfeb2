"""Chooses the values that wait on the host, by a linear program of keeping, recomputing and copying.

Memory is counted at two moments: between forward and backward, and in the operation of forward that needs the most
whatever is kept, as a loss does; what is not out by then is there. The engines are rows: what is made after a moment of
forward must be out by its end, and what is read before a moment of backward must be back by then, or the step takes as
much longer.
So it proposes; the search for a plan with these values on the host, and the simulated engines, judge.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from math import inf

import numpy as np

from thunder_memsave.planner.linear.coverage import add_coverage
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.linear.program import LinearProgram
from thunder_memsave.planner.offload.copies import LEAST_BYTES
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.work import Work

_MOMENTS = 24
"""Moments of forward, and of backward, that have a row."""
_HALVINGS = 12
"""Times that have a row beside these moments, each half of the one before."""
WHOLE, HALF = 0.99, 0.5
"""The part of a value that the program copies from which all of it is proposed. From a half on, copies may take longer
than there is time; with the whole alone, the search recomputes what is left over."""
_PER_OFFLOADED_BYTE = 1e-4
"""Cost of a unit of bytes on the host: next to nothing, so that of two equally fast mixes the one with fewer wins."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What may be offloaded, at what cost."""

    model: Model
    """Of plans without offload: needs, costs and pins."""
    costs_us: Sequence[float]
    """Time of each operation of the graph, forward and backward."""
    rates: CopyRates
    host_bytes: float
    """Budget of host memory; infinite: none."""
    least_bytes: int = LEAST_BYTES

    @property
    def candidates(self) -> tuple[int, ...]:
        """Activations that backward itself reads, and that no pin decides."""
        needs, pinned = self.model.needs, self.model.pinned
        storages = needs.graph.storages
        return tuple(
            s
            for s in needs.storages
            if s in needs.first and s not in pinned and s not in needs.graph.gradients
            if storages[s].kind == "activation" and storages[s].nbytes >= self.least_bytes
        )

    @cached_property
    def critical(self) -> int:
        """The position of the operation of forward that holds the most in every plan; forward's end, if that does."""
        forward = self.model.always_live.forward
        return int(np.argmax(forward)) if forward.max() > forward[-1] else len(forward) - 1

    @property
    def always_bytes(self) -> float:
        """Bytes that every plan holds there."""
        return float(self.model.always_live.forward[self.critical])

    def subsets_that_fit(self) -> Iterator[tuple[int, ...]]:
        """Yield every set of candidates but none, as far as the host has room."""
        storages = self.model.needs.graph.storages
        for length in range(1, len(self.candidates) + 1):
            for some in combinations(self.candidates, length):
                if sum(storages[s].nbytes for s in some) <= self.host_bytes:
                    yield some

    def all_that_fit(self) -> frozenset[int]:
        """Return the candidates, those that backward reads last first, as far as the host has room."""
        needs = self.model.needs
        found, left = set(), self.host_bytes
        for storage in sorted(self.candidates, key=lambda s: (-needs.first[s], s)):
            nbytes = needs.graph.storages[storage].nbytes
            if nbytes <= left:
                found.add(storage)
                left -= nbytes
        return frozenset(found)

    def within(
        self,
        budget_bytes: float,
        work: Work,
        *,
        least_part: float = WHOLE,
        counts_forward: bool = True,
    ) -> frozenset[int] | None:
        """Return the values of the fastest mix that holds at most these bytes between forward and backward.

        None: the program has no solution, or was not solved in the work that is left.

        Args:
            budget_bytes: What is held.
            work: Takes the work.
            least_part: Of a value, from which it is one of them.
            counts_forward: Whether the operation of forward that needs the most has to fit too.
        """
        return _Mix(self, budget_bytes, counts_forward=counts_forward).solve(work, least_part)

    def bound_us(self, budget_bytes: float, work: Work) -> float:
        """Return a lower bound on the time that any mix adds, by recomputing and by waiting; 0 if it was not found.

        Time that recomputation takes hides copies back, wherever in backward it is.
        """
        return _Mix(self, budget_bytes, counts_forward=True, is_bound=True).bound_us(work)


class _Mix:
    """The program: each storage is kept, recomputed or offloaded."""

    def __init__(
        self, choice: Choice, budget_bytes: float, *, counts_forward: bool, is_bound: bool = False
    ) -> None:
        self._choice, model = choice, choice.model
        self._needs, self._model, self._program = model.needs, model, LinearProgram()
        self._again = {
            o: self._program.variable(cost=model.costs_us[o] / model.unit_us)
            for o in self._needs.ops
        }
        self._kept = {s: self._keep_variable(s) for s in self._needs.storages}
        small = 0.0 if is_bound else _PER_OFFLOADED_BYTE / model.unit_bytes
        self._away = {
            s: self._program.variable(cost=small * self._bytes(s)) for s in choice.candidates
        }
        self._cover()
        self._limit_memory(budget_bytes)
        in_forward, in_backward = (self._program.variable(cost=1.0, high=inf) for _ in range(2))
        if counts_forward and choice.critical < model.needs.graph.num_forward:
            self._limit_critical(budget_bytes, in_forward)
        self._limit_engine(self._outs(self._away), [(in_forward, -1.0)])
        again = [(v, -model.costs_us[o] / model.unit_us) for o, v in self._again.items()]
        self._limit_engine(self._ins(), [(in_backward, -1.0), *(again if is_bound else ())])

    def solve(self, work: Work, least_part: float) -> frozenset[int] | None:
        values = self._program.relaxed(work).values
        if values is None:
            return None
        return frozenset(s for s, variable in self._away.items() if values[variable] > least_part)

    def bound_us(self, work: Work) -> float:
        solution = self._program.relaxed(work)
        return 0.0 if solution.values is None else solution.bound * self._model.unit_us

    def _keep_variable(self, storage: int) -> int:
        pin = self._model.pinned.get(storage)
        return self._program.variable(low=float(pin is True), high=float(pin is not False))

    def _cover(self) -> None:
        """Let what is on the host count as kept: a variable of its own, the sum of both."""
        there: dict[int, int] = {}
        for storage, kept in self._kept.items():
            if storage not in self._away:
                there[storage] = kept
                continue
            there[storage] = self._program.variable()
            terms = [(kept, 1.0), (self._away[storage], 1.0), (there[storage], -1.0)]
            self._program.row(terms, least=0.0)
        needs = self._needs
        add_coverage(self._program, needs, there, self._again)
        for storage in needs.must_keep & needs.first.keys():
            self._program.row([(there[storage], 1.0)], least=1.0)

    def _limit_memory(self, budget_bytes: float) -> None:
        always = float(self._model.always_live.forward[-1])
        most = (budget_bytes - always) / self._model.unit_bytes
        self._program.row(self._held(self._kept), most=most)
        if self._choice.host_bytes < inf:
            most = self._choice.host_bytes / self._model.unit_bytes
            self._program.row(self._held(self._away), most=most)

    def _held(self, variables: Mapping[int, int], *, sign: int = 1) -> list[tuple[int, float]]:
        """Return the terms of the bytes of storages, each as far as its variable says."""
        unit = sign * self._model.unit_bytes
        return [(v, self._bytes(s) / unit) for s, v in variables.items()]

    def _limit_critical(self, budget_bytes: float, more: int) -> None:
        """Count at an operation of forward what is kept, and what is not out by its start.

        `more` is the variable of the time that forward waits.
        """
        needs, model, program = self._needs, self._model, self._program
        position = self._choice.critical
        early = {s: v for s, v in self._away.items() if needs.producer[s] < position}
        out = program.variable(high=inf)
        there = {s: v for s, v in self._kept.items() if needs.producer[s] < position}
        most = (budget_bytes - self._choice.always_bytes) / model.unit_bytes
        program.row([*self._held(there), *self._held(early), (out, -1.0)], most=most)
        program.row([(out, 1.0), *self._held(early, sign=-1)], most=0.0)
        # What is out was made before a moment, or was copied after it.
        per_us = self._choice.rates.bytes_per_s / 1e6 / model.unit_bytes
        left_us = self._outs(early, position)
        for number in _lengths(left_us):
            before = self._held({s: early[s] for s, _ in left_us[number:]}, sign=-1)
            later = (more, -per_us * model.unit_us)
            program.row([(out, 1.0), *before, later], most=per_us * left_us[number - 1][1])

    def _limit_engine(
        self, left_us: Sequence[tuple[int, float]], more: Sequence[tuple[int, float]]
    ) -> None:
        """Require of copies, in the order of their slack, that they fit into the time, or into `more` of it."""
        unit = self._model.unit_us
        for number in _lengths(left_us):
            some = left_us[:number]
            rates = self._choice.rates
            terms = [(self._away[s], rates.us(self._bytes(s)) / unit) for s, _ in some]
            self._program.row([*terms, *more], most=some[-1][1] / unit)

    def _outs(
        self, storages: Iterable[int], position: int | None = None
    ) -> list[tuple[int, float]]:
        """Return each storage with the time from when it is made to an operation, the shortest first.

        None: to the end of forward.
        """
        starts = [0.0, *accumulate(self._choice.costs_us[: self._needs.graph.num_forward])]
        end_us = starts[-1] if position is None else starts[position]
        at = {s: end_us - starts[self._needs.producer[s] + 1] for s in storages}
        return sorted(at.items(), key=lambda pair: pair[1])

    def _ins(self) -> list[tuple[int, float]]:
        """Return each candidate with the time from backward's begin to its first reader, the shortest first."""
        graph = self._needs.graph
        begins = [0.0, *accumulate(self._choice.costs_us[graph.num_forward :])]
        at = {s: begins[self._needs.first[s]] for s in self._away}
        return sorted(at.items(), key=lambda pair: pair[1])

    def _bytes(self, storage: int) -> int:
        return self._needs.graph.storages[storage].nbytes


def _lengths(left_us: Sequence[tuple[int, float]]) -> list[int]:
    """Return the lengths of the beginnings that have a row, the whole first.

    They are evenly spaced, and beside these there are the copies that have half of the most time, a quarter, and so on:
    a copy that has little time cannot begin sooner, so a row for many copies would let it pass.
    """
    even = range(len(left_us), 0, -max(1, -(-len(left_us) // _MOMENTS)))
    all_us = [us for _, us in left_us]
    halves = (bisect_right(all_us, all_us[-1] / 2**n) for n in range(_HALVINGS)) if all_us else ()
    return sorted({*even, *halves} - {0}, reverse=True)


def targets(budget_bytes: float, always_bytes: float) -> Iterator[float]:
    """Yield bytes that may leave enough of a budget to what backward makes; `always_bytes` are held anyway."""
    for part in (1.0, 0.75, 0.5, 0.25, 0.0):
        yield always_bytes + part * (budget_bytes - always_bytes)
