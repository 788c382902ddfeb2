"""Searches plans by programs of the few moments that bind: between forward and backward, and the worst of each layer.

A program's plan is simulated; where it needs more than the budget the moment gets a row, and where a moment with a row
needs more, because kernels and what runs again take memory inside, its row gets a correction. Programs for many layers
have no whole numbers, and leave out plans in which an operation that takes time runs again long before backward needs
it: those differ little from what is best, and most variables with them. What equal layers do alike in a solution they
go on doing in the next programs, which makes them small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from thunder_memsave.planner.blocks import find_blocks
from thunder_memsave.planner.bounds import SAFE
from thunder_memsave.planner.evaluate import Evaluated, Evaluator
from thunder_memsave.planner.linear import Solution
from thunder_memsave.planner.local import alike
from thunder_memsave.planner.model import Moment, PeakModel
from thunder_memsave.planner.moment_program import MayPrecede, MomentProgram, backward_moment
from thunder_memsave.planner.needs import NEVER, Needs
from thunder_memsave.planner.pace import Pace
from thunder_memsave.planner.prices import anchors, mix

_MOST_WHOLE = 5000
"""Storages up to which programs have whole numbers."""
_MOST_MOMENTS_OF_ALL = 2
"""Up to which all plans are in such a program."""
_MOST_ROUNDS = 10
_MOST_NEW = 12
_GAP = 2e-3


def search_moments(
    model: PeakModel,
    evaluate: Evaluator,
    *,
    free: Evaluated,
    budget_bytes: float,
    deadline_s: float,
    pace: Pace,
) -> float:
    """Evaluate fast plans that fit; the evaluator remembers them.

    Args:
        model: For its needs, costs and pins.
        evaluate: Of the same graph.
        free: The plan of the free wins, which does not fit.
        budget_bytes: What plans should fit in.
        deadline_s: On the clock of `time.thread_time`: a busy machine does not change the plan.
        pace: What HiGHS's limits are set by, since they are of the wall's clock.

    Returns:
        No plan takes fewer microseconds; 0 where nothing is known.
    """
    search = _Rounds(
        model=model,
        evaluate=evaluate,
        budget_bytes=budget_bytes,
        deadline_s=deadline_s,
        pace=pace,
        is_whole=len(model.needs.storages) <= _MOST_WHOLE,
    )
    search.run(free)
    return search.bound_us


def nearly_in_turn(model: PeakModel) -> MayPrecede:
    """Leaves out that what takes time runs again before backward is in its layer."""
    needs, begins = model.needs, _begins(model)
    runs: dict[int, int] = {}
    for op in reversed(needs.ops):
        readers = (r for s in needs.makes[op] for r in needs.readers(s))
        early = min((runs[r] for r in readers), default=NEVER)
        if needs.graph.ops[op].flops or needs.graph.ops[op].sent_bytes:
            early = max(early, begins.get(op, 0))
        runs[op] = min([early, *(needs.first.get(s, NEVER) for s in needs.makes[op])])
    return lambda op, position: runs[op] <= position


def _begins(model: PeakModel) -> dict[int, int]:
    """Where backward of an operation's layer begins."""
    blocks = find_blocks(model.needs, model.costs_us)
    return {op: block.backward.start for block in blocks for op in block.forward}


@dataclass(kw_only=True)
class _Rounds:
    """One program after the other, and what they have taught."""

    model: PeakModel
    evaluate: Evaluator
    budget_bytes: float
    deadline_s: float
    pace: Pace
    is_whole: bool
    bound_us: float = 0.0
    _corrections: dict[Moment, float] = field(default_factory=dict)
    _alike: dict[int, float] = field(default_factory=dict)
    """Storages that all equal layers keep (1), or not (0)."""
    _over: Evaluated | None = None

    def run(self, free: Evaluated) -> None:
        """Until a plan fits that is near the bound, or the time is over."""
        last = Moment("forward", self.model.needs.graph.num_forward)
        self._corrections[last] = 0.0
        self._add(free, 1)
        for _ in range(_MOST_ROUNDS):
            if time.thread_time() > self.deadline_s:
                break
            found = self._next()
            if found is None or found.peak_bytes <= self.budget_bytes:
                break
            self._over = found
            self._correct(found, self._add(found, _MOST_NEW))
        self._mix()

    def _next(self) -> Evaluated | None:
        """The plan of the next program."""
        is_corrected = any(self._corrections.values())
        is_first = len(self._corrections) <= _MOST_MOMENTS_OF_ALL and not is_corrected
        has_all = self.is_whole and is_first
        program = MomentProgram(
            self.model,
            self.budget_bytes,
            may_precede=None if has_all else self._in_turn,
            whole=self.is_whole,
            decided=self._alike,
        )
        for moment, nbytes in self._corrections.items():
            program.count(moment, correction_bytes=nbytes)
        left_s = max(0.5, self.deadline_s - time.thread_time())
        solution = program.solve(time_limit_s=self.pace.wall_s(left_s), gap=_GAP)
        if has_all:
            self.bound_us = max(self.bound_us, solution.bound * SAFE * self.model.unit_us)
        if solution.values is None:
            return None
        if not self.is_whole:
            self._decide(program, solution)
        return self.evaluate(program.keep(solution))

    def _decide(self, program: MomentProgram, solution: Solution) -> None:
        """What all equal layers do in a solution, and in the fastest plan that fits, is not asked again."""
        if self._alike or (fits := self.evaluate.fastest_within(self.budget_bytes)) is None:
            return
        for group in alike(self.model):
            parts = {program.part(solution, storage) for storage in group}
            parts |= {float(storage in fits.keep) for storage in group}
            if len(group) > 1 and parts in ({0.0}, {1.0}):
                self._alike.update(dict.fromkeys(group, parts.pop()))

    def _add(self, found: Evaluated, most: int) -> set[Moment]:
        """Give rows to the moments at which a plan needs the most, one of each layer."""
        worst: dict[object, tuple[int, Moment]] = {}
        layer = self._layers
        for moment, nbytes in found.live_bytes.items():
            at = backward_moment(moment)
            where = (at.phase, at.position == self.model.needs.graph.num_forward, layer(at))
            if nbytes > max(self.budget_bytes, worst.get(where, (0,))[0]):
                worst[where] = nbytes, at
        ranked = [moment for _, moment in sorted(worst.values(), reverse=True)]
        new = [moment for moment in ranked if moment not in self._corrections][:most]
        self._corrections.update(dict.fromkeys(new, 0.0))
        return set(new)

    def _correct(self, found: Evaluated, new: set[Moment]) -> None:
        """Let rows see by how much they were wrong."""
        missed: dict[Moment, float] = {}
        for moment, nbytes in found.live_bytes.items():
            at = backward_moment(moment)
            if at in self._corrections and at not in new and nbytes > self.budget_bytes:
                missed[at] = max(missed.get(at, 0.0), nbytes - self.budget_bytes)
        for at, more_bytes in missed.items():
            self._corrections[at] += more_bytes + self.model.unit_bytes

    @cached_property
    def _in_turn(self) -> MayPrecede:
        return nearly_in_turn(self.model)

    @cached_property
    def _layers(self) -> Callable[[Moment], int]:
        blocks = find_blocks(self.model.needs, self.model.costs_us)
        layer = {p: n for n, block in enumerate(blocks) for p in block.backward}
        return lambda moment: layer.get(moment.position, -1) if moment.phase == "backward" else -1

    def _mix(self) -> None:
        """Between the last plan that does not fit and the best that does."""
        fits = self.evaluate.fastest_within(self.budget_bytes)
        if self._over is None or fits is None:
            return
        if fits.recompute_us > self._over.recompute_us:
            cuts = _cuts(self.model.needs)
            over, budget_bytes = self._over, self.budget_bytes
            mix(self.evaluate, self.model.needs, cuts, over, fits, budget_bytes, self.deadline_s)


def _cuts(needs: Needs) -> list[int]:
    points: Iterable[tuple[int, ...]] = anchors(needs)
    return [max(needs.producer[s] for s in live) for live in points]
