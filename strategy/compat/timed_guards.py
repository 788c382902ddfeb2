"""Dynamo flushes caches and times the guards of each capture, for its log: 20 to 40 ms.

Delete this file when `tests/compat/test_timed_guards.py` says that it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch._dynamo import guards


@contextmanager
def not_timed() -> Iterator[None]:
    """Let Dynamo build guards without timing them."""
    timed: Any = guards.profile_guard_manager
    guards.profile_guard_manager = cast(Any, _no_time)
    try:
        yield
    finally:
        guards.profile_guard_manager = timed


def _no_time(*given: object) -> float:
    return 0.0
