"""Refuses a budget on all ranks."""

from __future__ import annotations

from typing import NoReturn

from thunder_memsave.budget.plan_request import Offer
from thunder_memsave.distributed.agreement import OtherRankError, is_rank_zero, together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import BudgetError


def refuse_budget(
    offer: Offer, *, budget_bytes: int, more_bytes: int, data_parallel: DataParallel | None
) -> NoReturn:
    """Raise an error that names the smallest plan's budget: with that budget, this plan is found again. A collective.

    Args:
        offer: The smallest plan, with a bound.
        budget_bytes: What was asked for.
        more_bytes: Bytes by which the plan exceeds it.
        data_parallel: The ranks, of which rank 0 says why.

    Raises:
        BudgetError: on rank 0.
        OtherRankError: on all others.
    """
    assert offer.bound_bytes is not None
    error = BudgetError.no_plan(
        budget_bytes=budget_bytes,
        smallest_bytes=(smallest_bytes := budget_bytes + more_bytes),
        bound_bytes=min(offer.bound_bytes, smallest_bytes),
        smallest_plan=offer.plan,
    )

    def say() -> None:
        if is_rank_zero(data_parallel):
            raise error

    together(say, data_parallel, error_elsewhere=OtherRankError)
    raise AssertionError("rank 0 raises, and so do all")
