"""Searches plans by programs of the few moments that bind: between forward and backward, and the worst of each layer.

A program's plan is simulated. A moment at which it exceeds the budget gets a row; if it has one already, and exceeds it
because of memory inside kernels and recomputations, its row gets a correction. If too many layers are recomputed at
once, the storages that pass between two of them are kept. Programs are relaxed until nothing new is learned, and
integer from then on. They leave out plans that recompute an expensive operation long before backward needs it, which
are seldom much better, and most variables with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from thunder_memsave.planner.choices import NEVER, Needs
from thunder_memsave.planner.linear.cut_program import (
    MayPrecede,
    MomentProgram,
    backward_moment,
)
from thunder_memsave.planner.linear.pace import Pace
from thunder_memsave.planner.linear.peak_program import Moment, PeakModel
from thunder_memsave.planner.search.by_price import anchors, mix
from thunder_memsave.planner.search.early_layers import EarlyBytes
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator
from thunder_memsave.planner.search.find_layers import Block, find_blocks

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
) -> None:
    """Evaluate fast plans that fit; the evaluator remembers them.

    Args:
        model: Provides needs, costs and pins.
        evaluate: Evaluator of the same graph.
        free: The plan of the free wins, which does not fit.
        budget_bytes: Bytes that plans should fit in.
        deadline_s: End of the search by `time.thread_time`: a busy machine does not change the plan.
        pace: Converts the time left into HiGHS's limits, which are wall-clock seconds.
    """
    search = _Rounds(
        model=model,
        evaluate=evaluate,
        budget_bytes=budget_bytes,
        deadline_s=deadline_s,
        pace=pace,
    )
    search.run(free)


def expensive_in_own_layer(model: PeakModel) -> MayPrecede:
    """Exclude that an expensive operation is recomputed before backward reaches its layer."""
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
    """Return, for each operation of forward, the position at which backward of its layer begins."""
    blocks = find_blocks(model.needs, model.costs_us)
    return {op: block.backward.start for block in blocks for op in block.forward}


@dataclass(kw_only=True)
class _Rounds:
    """Solves one program after the other, each with the rows and corrections that the last plan called for."""

    model: PeakModel
    evaluate: Evaluator
    budget_bytes: float
    deadline_s: float
    pace: Pace
    _correction_bytes: dict[Moment, float] = field(default_factory=dict)
    """Bytes to add to each row, summed over all rounds; the keys are the moments that have a row."""
    _is_integer: bool = False
    """True if the next programs are integer, False if they are relaxed."""
    _closed: dict[int, float] = field(default_factory=dict)
    """Storages between layers that are kept (1), so that no layer recomputes through them."""
    _over: Evaluated | None = None

    def run(self, free: Evaluated) -> None:
        """Solve programs until a plan fits that is near the bound, or the time is over."""
        last = Moment("forward", self.model.needs.graph.num_forward)
        self._correction_bytes[last] = 0.0
        self._add(free, 1)
        for _ in range(_MOST_ROUNDS):
            if time.thread_time() > self.deadline_s:
                break
            found = self._next()
            is_last = self._is_integer
            if found is None or (found.peak_bytes <= self.budget_bytes and is_last):
                break
            self._learn(found)
        self._mix()

    def _learn(self, found: Evaluated) -> None:
        """Add rows or corrections for a plan that needs too much; if it fits, make the next program integer."""
        if found.peak_bytes <= self.budget_bytes:
            self._is_integer = True
            return
        self._over = found
        if self._close(found):
            return
        new = self._add(found, _MOST_NEW)
        if new or self._is_integer:
            self._correct(found, new)
        self._is_integer |= not new

    def _next(self) -> Evaluated | None:
        """Evaluate the plan of the next program; None if it has no solution."""
        program = MomentProgram(
            self.model,
            self.budget_bytes,
            may_precede=self._may_precede,
            integer=self._is_integer,
            decided=self._closed,
        )
        for moment, nbytes in self._correction_bytes.items():
            program.count(moment, correction_bytes=nbytes)
        left_s = max(0.5, self.deadline_s - time.thread_time())
        solution = program.solve(time_limit_s=self.pace.wall_s(left_s), gap=_GAP)
        return None if solution.values is None else self.evaluate(program.keep(solution))

    def _add(self, found: Evaluated, most: int) -> set[Moment]:
        """Give rows to the moments at which a plan needs the most, one per layer; return the new ones."""
        worst: dict[object, tuple[int, Moment]] = {}
        layer = self._layers
        for moment, nbytes in found.live_bytes.items():
            at = backward_moment(moment)
            where = (at.phase, at.position == self.model.needs.graph.num_forward, layer(at))
            if nbytes > max(self.budget_bytes, worst.get(where, (0,))[0]):
                worst[where] = nbytes, at
        ranked = [moment for _, moment in sorted(worst.values(), reverse=True)]
        new = [moment for moment in ranked if moment not in self._correction_bytes][:most]
        self._correction_bytes.update(dict.fromkeys(new, 0.0))
        return set(new)

    def _correct(self, found: Evaluated, new: set[Moment]) -> None:
        """Raise the corrections of rows by the bytes that they missed."""
        missed: dict[Moment, float] = {}
        for moment, nbytes in found.live_bytes.items():
            at = backward_moment(moment)
            if at in self._correction_bytes and at not in new and nbytes > self.budget_bytes:
                missed[at] = max(missed.get(at, 0.0), nbytes - self.budget_bytes)
        for at, more_bytes in missed.items():
            self._correction_bytes[at] += more_bytes + self.model.unit_bytes

    def _close(self, found: Evaluated) -> bool:
        """Keep the storages between layers if too many are recomputed at once; tell whether that changes anything."""
        if not self._blocks:
            return False
        self._early.observe(found)
        if self._early.most_bytes <= self.budget_bytes:
            return False
        firsts = self._early.first_layers(self.budget_bytes)
        before, pinned = self._closed, self.model.pinned
        inputs = [s for n in firsts for s in self._blocks[n].inputs]
        self._closed = {s: 1.0 for s in inputs if pinned.get(s) is not False}
        return self._closed != before

    @cached_property
    def _early(self) -> EarlyBytes:
        return EarlyBytes(blocks=self._blocks)

    @cached_property
    def _blocks(self) -> Sequence[Block]:
        return find_blocks(self.model.needs, self.model.costs_us)

    @cached_property
    def _may_precede(self) -> MayPrecede:
        return expensive_in_own_layer(self.model)

    @cached_property
    def _layers(self) -> Callable[[Moment], int]:
        blocks = find_blocks(self.model.needs, self.model.costs_us)
        layer = {p: n for n, block in enumerate(blocks) for p in block.backward}
        return lambda moment: layer.get(moment.position, -1) if moment.phase == "backward" else -1

    def _mix(self) -> None:
        """Mix the last plan that does not fit with the best that does."""
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
