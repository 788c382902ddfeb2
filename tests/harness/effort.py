"""Lets plans be good enough for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from thunder_memsave.budget import plan_request
from thunder_memsave.planner.search.mixes import solve_mix
from thunder_memsave.planner.search.solve import solve


@contextmanager
def little_effort(seconds: float = 0.3) -> Iterator[None]:
    """Limit the work for each plan; what is asserted of plans must hold for all of them."""
    with (
        patch.object(plan_request, "solve", partial(solve, time_limit_s=seconds)),
        patch.object(plan_request, "solve_mix", partial(solve_mix, time_limit_s=seconds)),
    ):
        yield
