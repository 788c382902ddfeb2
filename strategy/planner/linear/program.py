"""A mixed-integer linear program, built row by row and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
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

_OPTIMAL = 0
_INFEASIBLE = 2
_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The result of HiGHS."""

    values: np.ndarray | None
    """Values of all variables; None if no solution was found in time, or none exists."""
    is_infeasible: bool
    """True if it is proven that there is no solution."""
    bound: float
    """Lower bound on the cost of all solutions."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A relaxed solution, and the dual price of each row."""

    values: np.ndarray
    cost: float
    prices: np.ndarray
    """Fall of the cost per unit that a row's `most` rises, or its rise per unit of `least`; at least 0."""


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

    def solve(
        self,
        *,
        relaxed: bool = False,
        time_limit_s: float | None = None,
        gap: float = 1e-9,
        most_nodes: int | None = None,
    ) -> Solution:
        """Minimise the cost.

        Args:
            relaxed: Ignore that variables are integer: a lower bound, quickly.
            time_limit_s: Seconds after which HiGHS stops with the best solution that it has found.
            gap: Relative gap to the bound at which HiGHS stops.
            most_nodes: Nodes of the search tree after which HiGHS stops: the same result on any machine.
        """
        if not self.cost:  # HiGHS refuses a program without variables
            return Solution(values=np.zeros(0), is_infeasible=False, bound=0.0)
        options: dict[str, float] = {"mip_rel_gap": gap}
        if time_limit_s is not None:
            options["time_limit"] = max(time_limit_s, 0.05)
        if most_nodes is not None and not relaxed:
            options["node_limit"] = most_nodes
        with nullcontext() if relaxed else without_noise_of_highs():
            result = milp(
                np.array(self.cost),
                integrality=None if relaxed else np.array(self.integer, dtype=int),
                bounds=Bounds(np.array(self.low), np.array(self.high)),
                constraints=LinearConstraint(self._matrix(), self._least, self._most),
                options=options,
            )
        bound = getattr(result, "mip_dual_bound", None)
        if result.status == _OPTIMAL and (relaxed or bound is None):
            bound = result.fun
        return Solution(
            values=result.x,
            is_infeasible=result.status == _INFEASIBLE,
            bound=-inf if bound is None or not np.isfinite(bound) else float(bound),
        )

    def solve_near(self, part: float, *, time_limit_s: float, gap: float) -> Solution:
        """Minimise over the integer solutions near the relaxed one: in far less time than over all.

        Args:
            part: Fraction of the cost: an integer variable is fixed to its relaxed value if another value alone costs
                more than this (reduced cost fixing).
            time_limit_s: Seconds after which HiGHS stops, for each of the two programs.
            gap: As for `solve`.

        Returns:
            The best of these solutions; its bound holds for all solutions.
        """
        relaxed = self._relaxed(max(time_limit_s, 0.05))
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
        found = near.solve(time_limit_s=time_limit_s, gap=gap)
        bound = relaxed.fun + most if found.is_infeasible else min(found.bound, relaxed.fun + most)
        return Solution(
            values=found.values, is_infeasible=False, bound=max(bound, float(relaxed.fun))
        )

    def prices(self) -> Prices | None:
        """Solve the relaxation; None if no solution was found. Each row must have one bound."""
        result = self._relaxed()
        if result.status != _OPTIMAL:
            return None
        return Prices(
            values=result.x,
            cost=float(result.fun),
            prices=np.maximum(0.0, -result.ineqlin.marginals),
        )

    def _relaxed(self, time_limit_s: float = inf) -> OptimizeResult:
        least, most = np.array(self._least), np.array(self._most)
        signs = np.where(np.isfinite(most), 1.0, -1.0)
        return linprog(
            np.array(self.cost),
            A_ub=self._matrix() * signs[:, None],
            b_ub=np.where(np.isfinite(most), most, -least),
            bounds=np.stack([self.low, self.high], axis=1),
            method="highs",
            options={"time_limit": time_limit_s},
        )

    def _matrix(self) -> csr_array:
        shape = (len(self._starts) - 1, len(self.cost))
        matrix = csr_array((self._factors, self._columns, self._starts), shape=shape)
        matrix.sum_duplicates()
        return matrix
