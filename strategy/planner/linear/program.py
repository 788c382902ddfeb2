"""A mixed-integer linear program, built row by row and solved by HiGHS.

HiGHS is limited by iterations and nodes, so that it finds the same on a fast, a slow and a busy machine. Its limit in
seconds is many times as long, and only ends what is stuck.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

# scipy has no types of its own.
from scipy.optimize import (  # type: ignore[import-untyped]
    Bounds,
    LinearConstraint,
    OptimizeResult,
    linprog,
    milp,
)
from scipy.sparse import csr_array  # type: ignore[import-untyped]

from thunder_memsave.planner.linear.highs_stdout import without_noise_of_highs
from thunder_memsave.planner.work import Work

_OPTIMAL = 0
_INFEASIBLE = 2
_TOLERANCE = 1e-6
_SHORTEST = 0.05
"""Work that each program may take, also when nothing is left."""
_STUCK_S = 30.0
"""Seconds after which HiGHS is taken to be stuck, beside ten times those of the work that is left."""
_UNITS, _PER_NONZERO, _PER_ITERATION, _PER_ROW = 2e-3, 2e-6, 7e-6, 3e-9
"""Work of a relaxed program: for any, for each factor, for each iteration, and that for each row in addition."""
_PER_INTEGER_NONZERO, _PER_SQUARE, _NODES = 1e-4, 1e-8, 10
"""Work of an integer program: the most for each factor, for each pair of them, and the nodes that double it."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The result of HiGHS."""

    values: np.ndarray | None
    """Values of all variables; None if no solution was found in time, or none exists."""
    is_infeasible: bool
    """True if it is proven that there is no solution."""
    bound: float
    """Lower bound on the cost of all solutions."""


_NOTHING = Solution(values=np.zeros(0), is_infeasible=False, bound=0.0)
"""Solution of a program without variables, which HiGHS refuses."""


@dataclass(kw_only=True)
class LinearProgram:
    """Minimises a linear cost, subject to rows."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    _columns: list[int] = field(default_factory=list)
    _factors: list[float] = field(default_factory=list)
    _starts: list[int] = field(default_factory=lambda: [0])
    _least: list[float] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)

    def variable(
        self, *, cost: float = 0.0, low: float = 0.0, high: float = 1.0, integer: bool = False
    ) -> int:
        """Add a variable, and return its index."""
        self.cost.append(cost)
        self.low.append(low)
        self.high.append(high)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(
        self,
        terms: Mapping[int, float] | Iterable[tuple[int, float]],
        *,
        least: float = -inf,
        most: float = inf,
    ) -> None:
        """Require that a weighted sum of variables is within bounds; a variable may occur twice."""
        for column, factor in terms.items() if isinstance(terms, Mapping) else terms:
            self._columns.append(column)
            self._factors.append(factor)
        self._starts.append(len(self._columns))
        self._least.append(least)
        self._most.append(most)

    def relaxed(self, work: Work) -> Solution:
        """Minimise the cost as if no variable were integer: a lower bound, quickly."""
        if not self.cost:
            return _NOTHING
        result = self._relaxed(work)
        is_solved = result.status == _OPTIMAL
        return Solution(
            values=result.x if is_solved else None,
            is_infeasible=result.status == _INFEASIBLE,
            bound=float(result.fun) if is_solved else -inf,
        )

    def solve(self, work: Work | None = None, *, gap: float = 1e-9) -> Solution:
        """Minimise the cost.

        Args:
            work: Gets what the solver does, which ends with it. None: no limit.
            gap: Relative gap to the bound at which HiGHS stops.
        """
        if not self.cost:
            return _NOTHING
        work = work or Work()
        root = self._root_units
        options: dict[str, float] = {"mip_rel_gap": gap, "time_limit": _stuck_s(work)}
        if work.left < inf:
            options["node_limit"] = max(1, int(_NODES * (work.left / root - 1.0)))
        with without_noise_of_highs():
            result = milp(
                np.array(self.cost),
                integrality=np.array(self.integer, dtype=int),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                constraints=LinearConstraint(self._matrix(), self._least, self._most),
                options=options,
            )
        work.add(root * (1.0 + (result.get("mip_node_count") or 0) / _NODES))
        bound = getattr(result, "mip_dual_bound", None)
        return Solution(
            values=result.x,
            is_infeasible=result.status == _INFEASIBLE,
            bound=-inf if bound is None or not np.isfinite(bound) else float(bound),
        )

    def solve_near(self, work: Work, *, part: float, gap: float) -> Solution:
        """Minimise over the integer solutions near the relaxed one: in far less time than over all.

        Args:
            part: Fraction of the cost: an integer variable is fixed to its relaxed value if another value alone costs
                more than this (reduced cost fixing).
            work: As for `solve`.
            gap: As for `solve`.

        Returns:
            The best of these solutions; its bound holds for all solutions.
        """
        relaxed = self._relaxed(work)
        if relaxed.status != _OPTIMAL:
            is_infeasible = relaxed.status == _INFEASIBLE
            return Solution(values=None, is_infeasible=is_infeasible, bound=-inf)
        low, high = np.array(self.low), np.array(self.high)
        most, integer = part * abs(relaxed.fun), np.array(self.integer)
        fixed_low = integer & (relaxed.lower.marginals > most) & (relaxed.x < low + _TOLERANCE)
        fixed_high = integer & (relaxed.upper.marginals < -most) & (relaxed.x > high - _TOLERANCE)
        near = replace(
            self,
            low=np.where(fixed_high, high, low).tolist(),
            high=np.where(fixed_low, low, high).tolist(),
        )
        found = near.solve(work, gap=gap)
        bound = relaxed.fun + most if found.is_infeasible else min(found.bound, relaxed.fun + most)
        return Solution(
            values=found.values, is_infeasible=False, bound=max(bound, float(relaxed.fun))
        )

    @property
    def _root_units(self) -> float:
        num = len(self._columns)
        return _UNITS + min(_PER_INTEGER_NONZERO * num, _PER_SQUARE * num * num)

    def _relaxed(self, work: Work) -> OptimizeResult:
        """Return scipy's result. Each row must have one bound."""
        least, most = np.array(self._least), np.array(self._most)
        signs = np.where(np.isfinite(most), 1.0, -1.0)
        start = _UNITS + _PER_NONZERO * len(self._columns)
        each = _PER_ITERATION + _PER_ROW * len(least)
        options: dict[str, float] = {"time_limit": _stuck_s(work)}
        if work.left < inf:
            options["maxiter"] = int(max(work.left - start, _SHORTEST) / each)
        result = linprog(
            np.array(self.cost),
            A_ub=self._matrix() * signs[:, None],
            b_ub=np.where(np.isfinite(most), most, -least),
            bounds=np.stack([self.low, self.high], axis=1),
            method="highs",
            options=options,
        )
        work.add(start + each * max(0, result.nit))
        return result

    def _matrix(self) -> csr_array:
        shape = (len(self._starts) - 1, len(self.cost))
        matrix = csr_array((self._factors, self._columns, self._starts), shape=shape)
        matrix.sum_duplicates()
        return matrix


def _stuck_s(work: Work) -> float:
    return _STUCK_S + 10.0 * max(0.0, work.left)
