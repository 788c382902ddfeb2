"""Places copies beside what computes: the waits for copies out later, and the copies back earlier, as memory allows.

The program that comes in holds the least memory, and stands still while a copy runs that nothing hides. Here a value
stays on the device until its copy out has ended, as far as the target has room, and a copy back begins just in time for
its reader: as late as that, since it holds its destination from its start, and later if the target has no room. Weights
and optimizers' states that come from the host have their places already, and the same engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from thunder_memsave.planner.graph import FETCH, Program, Step
from thunder_memsave.planner.offload.copies import (
    COPY_IN,
    COPY_OUT,
    FETCH_STATES,
    WAIT_IN,
    WAIT_OUT,
    is_copy,
    runs_beside,
)
from thunder_memsave.planner.offload.engines import CopyRates

_MARGIN = 1.5
"""Copies back begin so early that they may take this many times as long as they should, if nothing is in their way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Positions of copies: numbers of the computing step before which each comes; copies are not counted."""

    waits: Mapping[str, int]
    """For each copy out, by the name that it makes: the wait; the number of forward's steps is forward's end."""
    starts: Mapping[str, int]
    """For each copy back, by the name that it makes: its start."""


def place(
    program: Program,
    costs_us: Sequence[float],
    step_peak_bytes: Sequence[int],
    *,
    target_bytes: int | None,
    rates: CopyRates,
) -> Placement:
    """Find the positions that hide as much of the copies as fits.

    Args:
        program: With copies, each wait for one out where forward last reads the value or sooner, and each copy back
            right before its first reader.
        costs_us: Microseconds of each step; those of copies are not read.
        step_peak_bytes: Peak of each step of the program.
        target_bytes: The peak that no step may exceed for copies' sake; None: no limit.
        rates: Of the copies.
    """
    around = _Around.of(program, costs_us, step_peak_bytes, rates)
    limit = inf if target_bytes is None else target_bytes
    return Placement(waits=_waits(around, limit, rates), starts=_starts(around, limit, rates))


def placed(program: Program, placement: Placement) -> Program:
    """Return the program with its copies where the placement says."""
    none = [0] * len(program.steps)
    around = _Around.of(program, none, none, CopyRates(bytes_per_s=inf, copy_us=0.0))
    at: dict[tuple[int, str], list[Step]] = {}
    for step, position in around.copies:
        op = step.op
        if op.symbol == WAIT_OUT:
            position = placement.waits.get(op.arguments[0], position)
        elif op.symbol == COPY_IN:
            position = placement.starts.get(op.results[0], position)
        at.setdefault((position, op.symbol), []).append(step)

    def copies(position: int, *symbols: str) -> list[Step]:
        return [step for symbol in symbols for step in at.get((position, symbol), ())]

    steps: list[Step] = []
    num_forward = 0
    for position in range(len(around.steps) + 1):
        steps += copies(position, COPY_OUT, WAIT_OUT)
        num_forward = len(steps) if position == around.num_forward else num_forward
        steps += copies(position, COPY_IN, WAIT_IN)
        steps += around.steps[position : position + 1]
    return replace(program, steps=tuple(steps), num_forward=num_forward)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy and its positions in the program that holds the least memory."""

    name: str
    nbytes: int
    begin: int
    wait: int


@dataclass(slots=True)
class _Around:
    """What computes, and the copies around it."""

    num_forward: int = 0
    steps: list[Step] = field(default_factory=list)
    us: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    copies: list[tuple[Step, int]] = field(default_factory=list)
    """The steps of copies, each with the number of the computing step that comes after it."""
    fetches_us: dict[int, float] = field(default_factory=dict)
    """How long the engine back copies weights or states that a step fetches, by its number."""

    @classmethod
    def of(
        cls,
        program: Program,
        costs_us: Sequence[float],
        step_peak_bytes: Sequence[int],
        rates: CopyRates,
    ) -> _Around:
        found = cls()
        rows = zip(program.steps, costs_us, step_peak_bytes, strict=True)
        for number, (step, us, nbytes) in enumerate(rows):
            op = step.op
            if is_copy(op):
                found.copies.append((step, len(found.steps)))
                continue
            if op.symbol in (FETCH, FETCH_STATES):
                copy_us = rates.us if op.symbol == FETCH else rates.states_us
                found.fetches_us[len(found.steps)] = copy_us(op.copied_bytes)
            found.num_forward += number < program.num_forward
            found.steps.append(step)
            found.us.append(0.0 if runs_beside(op) else us)
            found.peak_bytes.append(nbytes)
        return found

    def pairs(self, begins: str, waits: str) -> list[_Copy]:
        """Return the copies in one direction, in the order in which they begin."""
        ends = {s.op.arguments[0]: n for s, n in self.copies if s.op.symbol == waits}
        return [
            _Copy(s.op.results[0], s.op.copied_bytes, n, ends[s.op.results[0]])
            for s, n in self.copies
            if s.op.symbol == begins
        ]


def _waits(around: _Around, limit: float, rates: CopyRates) -> dict[str, int]:
    """Follow forward, and wait for each copy out when it has ended, when memory is short, or at the end of forward."""
    begin, free = _by(around.pairs(COPY_OUT, WAIT_OUT), "begin"), _by_wait(around)
    now_us = engine_us = 0.0
    ends: dict[str, float] = {}
    late: list[_Copy] = []
    found: dict[str, int] = {}
    for number in range(around.num_forward + 1):
        for copy in begin.get(number, ()):
            engine_us = ends[copy.name] = max(now_us, engine_us) + rates.us(copy.nbytes)
        late += free.get(number, ())
        late.sort(key=lambda c: ends[c.name])
        is_over = number == around.num_forward
        room = -inf if is_over else limit - around.peak_bytes[number]
        while late and (ends[late[0].name] <= now_us or sum(c.nbytes for c in late) > room):
            copy = late.pop(0)
            now_us = max(now_us, ends[copy.name])
            found[copy.name] = number
        now_us += 0.0 if is_over else around.us[number]
    return found


def _by(copies: Sequence[_Copy], attribute: str) -> dict[int, list[_Copy]]:
    found: dict[int, list[_Copy]] = {}
    for copy in copies:
        found.setdefault(getattr(copy, attribute), []).append(copy)
    return found


def _by_wait(around: _Around) -> dict[int, list[_Copy]]:
    return _by(around.pairs(COPY_OUT, WAIT_OUT), "wait")


def _starts(around: _Around, limit: float, rates: CopyRates) -> dict[str, int]:
    """Follow backward, and begin each copy back just in time, in the order of their readers, once memory allows it.

    It lets weights and states go first that it would hold up, if it arrives in time behind them.
    """
    copies = sorted(around.pairs(COPY_IN, WAIT_IN), key=lambda c: c.wait)
    wanted_us, latest_us = (_begins_us(around, copies, rates, m) for m in (_MARGIN, 1.0))
    peak_bytes = np.array([*around.peak_bytes, 0], dtype=float)
    now_us = engine_us = 0.0
    arrives_us: dict[int, float] = {}
    fetched_us: dict[str, float] = {}
    fetches = _Fetches(around)
    found: dict[str, int] = {}
    next_copy, blocked = 0, -1
    for number in range(around.num_forward, len(around.steps)):
        while next_copy < len(copies):
            copy = copies[next_copy]
            if number < copy.wait:
                if now_us + around.us[number] <= wanted_us[next_copy] or number <= blocked:
                    break
                begin_us = max(now_us, engine_us)
                end_us = begin_us + rates.us(copy.nbytes)
                if fetches.held_up(number, now_us, begin_us, end_us) <= latest_us[next_copy]:
                    break
                during = peak_bytes[number : copy.wait]
                over = np.flatnonzero(during + copy.nbytes > limit)
                if over.size:
                    blocked = number + int(over[-1])
                    break
                during += copy.nbytes
            engine_us = max(now_us, engine_us) + rates.us(copy.nbytes)
            arrives_us[copy.wait] = engine_us
            found[copy.name] = number
            next_copy, blocked = next_copy + 1, -1
        op = around.steps[number].op
        if number in around.fetches_us:
            engine_us = max(now_us, engine_us) + around.fetches_us[number]
            fetched_us[op.results[0]] = engine_us
        waits_us = (fetched_us.get(name, 0.0) for name in op.arguments)
        now_us = max(now_us, arrives_us.get(number, 0.0), *waits_us) + around.us[number]
    return found


class _Fetches:
    """The weights and states that the engine back copies, in order."""

    def __init__(self, around: _Around) -> None:
        self._us, self._fetches_us = around.us, around.fetches_us
        self._numbers = sorted(n for n in around.fetches_us if n >= around.num_forward)
        self._next = 0

    def held_up(self, number: int, now_us: float, begin_us: float, end_us: float) -> float:
        """Return when those have come that a copy would hold up; infinite: it holds none up.

        Args:
            number: Of the step before which the copy could begin.
            now_us: When that is.
            begin_us: When the engine is free.
            end_us: When the copy would have ended.
        """
        while self._next < len(self._numbers) and self._numbers[self._next] < number:
            self._next += 1
        at_us, found = now_us, inf
        free_us, before = begin_us, number
        for each in self._numbers[self._next :]:
            at_us += sum(self._us[before:each])
            before = each
            if at_us >= end_us:
                break
            found = free_us = max(free_us, at_us) + self._fetches_us[each]
        return found


def _begins_us(
    around: _Around, copies: Sequence[_Copy], rates: CopyRates, margin: float
) -> list[float]:
    """Return for each copy back the latest time from which it and those after it arrive in time.

    `margin`: How many times as long as they should they may take.
    """
    at_us = np.concatenate([[0.0], np.cumsum(around.us[around.num_forward :])]).tolist()
    taken = _taken_us(around, at_us)
    wanted = [0.0] * len(copies)
    next_us = inf
    for number in reversed(range(len(copies))):
        copy = copies[number]
        next_us = min(at_us[copy.wait - around.num_forward], next_us)
        left_us = margin * rates.us(copy.nbytes)
        while taken and next_us - taken[-1][1] < left_us:
            begin_us, end_us = taken.pop()
            left_us -= max(0.0, next_us - end_us)
            next_us = min(next_us, begin_us)
        next_us = wanted[number] = next_us - left_us
    return wanted


def _taken_us(around: _Around, at_us: Sequence[float]) -> list[tuple[float, float]]:
    """Return the beginnings and ends of what the engine back copies beside activations, in order."""
    found: list[tuple[float, float]] = []
    end_us = 0.0
    for number, us in sorted(around.fetches_us.items()):
        if number >= around.num_forward:
            begin_us = max(at_us[number - around.num_forward], end_us)
            end_us = begin_us + us
            found.append((begin_us, end_us))
    return found
