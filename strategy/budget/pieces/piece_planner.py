"""Plans the pieces of one module under the budget of the whole step."""

from __future__ import annotations

import copy
from functools import partial

from typing_extensions import override

from thunder_memsave.budget.agreed import structure_of
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.pieces.measured_step import Follow
from thunder_memsave.budget.pieces.pieces_budget import PiecesBudget
from thunder_memsave.budget.planned_call import Attempt, PlannedCall
from thunder_memsave.budget.way_search import Run
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.search.solve import Policy


class PiecePlanner(MemoryPlanner):
    """Gives a piece the plan that keeps little when it is new, and later the fastest one that the step has room for."""

    pieces: PiecesBudget
    _keeps_little: bool

    @classmethod
    def of(cls, planner: MemoryPlanner, pieces: PiecesBudget) -> PiecePlanner:
        """Return a planner with the settings of another, which lists its calls among the other's."""
        made = cls.__new__(cls)
        vars(made).update(vars(copy.copy(planner)))
        made._agreed, made._asked, made._last_resort, made._updates = {}, None, None, None
        made.pieces, made._keeps_little = pieces, False
        return made

    @property
    @override
    def is_of_piece(self) -> bool:
        return True

    @property
    def piece(self) -> int | None:
        """The number of the piece that is compiled now; None: it is new, or has no backward."""
        return self.pieces.piece

    @property
    @override
    def follow(self) -> Follow | None:
        return None if self.piece is None else partial(self.pieces.followed, self.piece)

    @override
    def memory_beside(self, unread_bytes: int) -> StepMemory:
        # `PiecesBudget` counts all of the module.
        return super().memory_beside(0)

    @override
    def _planned(self, attempt: Attempt) -> PlannedCall:
        attempt = self.pieces.given(attempt)
        call = super()._planned(attempt)
        return self.pieces.noted(call)

    @override
    def _evaluated(self, attempt: Attempt) -> PlannedCall:
        return super()._evaluated(self.pieces.given(attempt))

    @property
    @override
    def _policy(self) -> Policy:
        return "recompute_all" if self._keeps_little else super()._policy

    @override
    def _agreement(self, attempt: Attempt) -> str:
        return self.pieces.agreement(structure_of(attempt.graph), self._agreed)

    @override
    def _fitting(self, attempt: Attempt) -> Run:
        if self.pieces.is_new and self._policy == "plan":
            self._keeps_little = True
            try:
                offer = self._rank_zeros(attempt, structure_of(attempt.graph), None, ())
            finally:
                self._keeps_little = False
            run = self._within(attempt, offer.plan, self._budget_bytes)
            if run.more_bytes <= 0:
                return run
        return super()._fitting(attempt)

    @override
    def _limited_bytes(self, call: PlannedCall) -> int:
        own_bytes = super()._limited_bytes(call)
        if self.pieces.is_new or call.plan is None:
            return own_bytes
        step_bytes = self.pieces.step_bytes(call)
        return max(own_bytes, step_bytes) if self._limit.is_reserved else step_bytes
