"""Dynamo flushes caches and times the guards of each capture, for its log: 20 to 40 ms.

Delete this file when `tests/compat/test_timed_guards.py` says that it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo import guards

_TIMES = "profile_guard_manager"
"""A function of that module."""


@contextmanager
def not_timed() -> Iterator[None]:
    """Let Dynamo build guards without timing them."""
    timed = getattr(guards, _TIMES, None)
    if timed is None:  # a version that does not
        yield
        return
    setattr(guards, _TIMES, _no_time)
    try:
        yield
    finally:
        setattr(guards, _TIMES, timed)


def _no_time(*given: object) -> float:
    return 0.0
