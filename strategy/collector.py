"""Turns Python's garbage collector on or off for a while."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector(*, runs: bool) -> Iterator[None]:
    """Let garbage be collected here, or not; afterwards as before."""
    was_enabled = gc.isenabled()
    _set(runs=runs)
    try:
        yield
    finally:
        _set(runs=was_enabled)


def leave_garbage() -> None:
    """Collect no garbage by itself from here on, nor when the process ends, which takes seconds after a large plan."""
    gc.disable()
    atexit.register(gc.freeze)


def _set(*, runs: bool) -> None:
    if runs:
        gc.enable()
    else:
        gc.disable()
