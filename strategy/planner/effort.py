"""Says how much each search of the planner may do, and when it is good enough: all constants in one table.

A share is a fraction of the limit on work that `solve` gets. benchmarks/planner_ablation.py says what each search is
good for.

| search | share | for | ends when |
|---|---|---|---|
| all plans | - | few decisions | the best plan is proven |
| moments | 0.6 | the fastest | a plan from an integer program fits |
| proof | 0.2 | the fastest | the best plan is near its lower bound: then the searches below are left out |
| drop | 0.2 | the fastest | the plan fits |
| improve | 0.6 | the fastest | no move makes the plan faster |
| bisect | 1.0 | the smallest | the smallest plan is near its lower bound, or small enough |
| improve smallest | 0.6 | the smallest | no move makes the plan smaller |
"""

from __future__ import annotations

TIME_LIMIT_S = 10.0
"""Limit on work for one plan, unless the caller has another."""
FEW_DECISIONS = 16
"""Most decisions for which all plans are tried, until the best is proven; then no limit applies."""
SHARE_OF_MOMENTS = 0.6
SHARE_OF_PROOF = 0.2
SHARE_OF_DROP = 0.2
SHARE_OF_IMPROVE = 0.6
SHARE_OF_BISECT = 1.0

GOOD_GAP = 8e-3
"""Gap to the lower bound at which a plan is good enough."""
NEAR_PEAK = 0.9
"""Fraction of the budget below which a moment does not bind."""
MOST_BOUNDING, MOST_BOUNDING_TOGETHER = 10, 3
"""Most moments in the programs that bound all plans: one by one, and together."""

ROUNDS = 10
"""Most linear programs of the search by moments."""
MOST_NEW_MOMENTS = 12
"""Most moments that one plan gives rows to."""
INTEGER_GAP = 2e-3
"""Gap of integer programs."""
NEAR_RELAXED = 1e-3
"""Fraction of the relaxed cost: a variable whose other value costs more than this is fixed in the integer program."""

BISECTIONS = 8
"""Most budgets that are tried for the smallest plan."""
BISECTION_SHARE = 0.3
"""Most of the limit for one of them."""
NEAR_BOUND = 2e-3
"""Gap to the lower bound at which the smallest plan is small enough, and at which no other mix is proposed."""

MOST_OPS_OF_PROPOSALS = 60_000
"""Operations of a graph, once for each mix that was proposed, after which a good mix is enough."""
