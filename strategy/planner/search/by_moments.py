"""Searches plans by programs of the few moments that bind: between forward and backward, and the worst of each layer.

A program's plan is simulated. A moment at which it exceeds the budget gets a row; if it has one already, and exceeds it
because of memory inside kernels and recomputations, its row gets a correction. If too many layers are recomputed at
once, the storages that pass between two of them are kept. Programs are relaxed until nothing new is learned, and
integer from then on. They leave out plans that recompute an expensive operation long before backward needs it, which
are seldom much better, and most variables with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from thunder_memsave.planner.choices import NEVER
from thunder_memsave.planner.effort import INTEGER_GAP, MOST_NEW_MOMENTS, ROUNDS
from thunder_memsave.planner.linear.cut_program import (
    MayPrecede,
    MomentProgram,
    backward_moment,
)
from thunder_memsave.planner.linear.model import Model, Moment
from thunder_memsave.planner.search.early_layers import EarlyBytes
from thunder_memsave.planner.search.evaluate import Evaluated
from thunder_memsave.planner.search.find_layers import Block, find_blocks
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.work import Work


def search_moments(task: Task, work: Work) -> None:
    """Evaluate fast plans that fit."""
    _Rounds(task=task, work=work).run()


def expensive_in_own_layer(model: Model, blocks: Sequence[Block]) -> MayPrecede:
    """Exclude that an expensive operation is recomputed before backward reaches its layer."""
    needs = model.needs
    begins = {op: block.backward.start for block in blocks for op in block.forward}
    runs: dict[int, int] = {}
    for op in reversed(needs.ops):
        readers = (r for s in needs.makes[op] for r in needs.readers(s))
        early = min((runs[r] for r in readers), default=NEVER)
        if needs.graph.ops[op].flops or needs.graph.ops[op].communicates:
            early = max(early, begins.get(op, 0))
        runs[op] = min([early, *(needs.first.get(s, NEVER) for s in needs.makes[op])])
    return lambda op, position: runs[op] <= position


@dataclass(kw_only=True)
class _Rounds:
    """Solves one program after the other, each with the rows and corrections that the last plan called for."""

    task: Task
    work: Work
    _correction_bytes: dict[Moment, float] = field(default_factory=dict)
    """Bytes to add to each row, summed over all rounds; the keys are the moments that have a row."""
    _is_integer: bool = False
    """True if the next programs are integer, False if they are relaxed."""
    _closed: dict[int, float] = field(default_factory=dict)
    """Storages between layers that are kept (1), so that no layer recomputes through them."""

    def __post_init__(self) -> None:
        self.model, self.budget_bytes = self.task.model, self.task.budget_bytes

    def run(self) -> None:
        """Solve programs until a plan fits that is near the bound, or the work is over."""
        self._correction_bytes[self.model.between] = 0.0
        self._add(self.task.start, 1)
        for _ in range(ROUNDS):
            if self.work.is_over:
                break
            found = self._next()
            if found is None or (found.peak_bytes <= self.budget_bytes and self._is_integer):
                break
            self._learn(found)

    def _learn(self, found: Evaluated) -> None:
        """Add rows or corrections for a plan that needs too much; if it fits, make the next program integer."""
        if found.peak_bytes <= self.budget_bytes:
            self._is_integer = True
            return
        if self._close(found):
            return
        new = self._add(found, MOST_NEW_MOMENTS)
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
        solution = program.solve(self.work, gap=INTEGER_GAP)
        return None if solution.values is None else self.task.evaluate(program.keep(solution))

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
        return expensive_in_own_layer(self.model, self._blocks)

    @cached_property
    def _layers(self) -> Callable[[Moment], int]:
        layer = {p: n for n, block in enumerate(self._blocks) for p in block.backward}
        return lambda moment: layer.get(moment.position, -1) if moment.phase == "backward" else -1
