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


def collect_young() -> None:
    """Collect the garbage that was made last, and go through what stays of it no more than through older objects.

    Else Python would go through all of it a second time soon.
    """
    gc.collect(0)
    if not gc.get_freeze_count():  # what others froze stays frozen
        gc.freeze()
        gc.unfreeze()  # to the oldest generation


def leave_garbage() -> None:
    """Collect no garbage by itself from here on, nor when the process ends, which takes seconds after a large plan."""
    gc.disable()
    atexit.register(gc.freeze)


def _set(*, runs: bool) -> None:
    if runs:
        gc.enable()
    else:
        gc.disable()
