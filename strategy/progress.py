"""Reports the stages of a compilation while it runs, which takes minutes for a large model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Stage = Literal[
    "load libraries",
    "describe the model",
    "capture",
    "lower",
    "differentiate",
    "claim operations",
    "extract",
    "time operations",
    "solve",
    "simulate",
    "smallest budget",
    "other budgets",
    "reserved memory",
]

_listener: ContextVar[Callable[[Stage], None] | None] = ContextVar("listener", default=None)


def stage(name: Stage) -> None:
    """Report that a stage begins, and that the one before has ended; a stage may begin more than once."""
    if (listener := _listener.get()) is not None:
        listener(name)


@contextmanager
def listening(listener: Callable[[Stage], None]) -> Iterator[None]:
    """Call `listener` at the begin of every stage, until the context ends."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
