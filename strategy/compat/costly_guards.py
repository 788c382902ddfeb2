"""Dynamo does for the guards of each capture what only its log shows: 40 to 60 ms for 24 layers.

- It flushes caches and times the guards.
- It shortens the path of the file that each guard is from, again for each guard.

Delete this file when `tests/compat/test_costly_guards.py` says that it does neither.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch._dynamo import guards
from torch.utils import _traceback


@contextmanager
def built_quickly() -> Iterator[None]:
    """Let Dynamo build guards without timing them, and shorten each path once, if this version does either."""
    shorten = getattr(_traceback, "shorten_filename", None)
    with (
        patch.object(guards, "profile_guard_manager", _no_time, create=True),
        patch.object(_traceback, "shorten_filename", functools.cache(shorten or str), create=True),
    ):
        yield


def _no_time(*given: object) -> float:
    return 0.0
