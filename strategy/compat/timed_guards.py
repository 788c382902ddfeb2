"""Dynamo flushes caches and times the guards of each capture, for its log: 20 to 40 ms.

Delete this file when `tests/compat/test_timed_guards.py` says that it does not.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest.mock import patch

from torch._dynamo import guards


def not_timed() -> AbstractContextManager[object]:
    """Let Dynamo build guards without timing them, if this version does."""
    return patch.object(guards, "profile_guard_manager", _no_time, create=True)


def _no_time(*given: object) -> float:
    return 0.0
