"""Lets what `torch.utils.checkpoint` runs again in backward run as it did in the pieces of forward.

PyTorch calls the checkpointed function again when a gradient is on its way, after the module has returned. Ranks have
only rows of its weights then, and its submodules have their own `forward`. So the function that PyTorch remembers is
put into one that first makes both as they were: weights are gathered again, as FSDP does it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.utils.checkpoint

_REMEMBERS = next(
    name
    for name in (
        "_checkpoint_without_reentrant_generator_impl",  # of PyTorch 2.15; the other one calls it
        "_checkpoint_without_reentrant_generator",
    )
    if hasattr(torch.utils.checkpoint, name)
)
"""Function of torch.utils.checkpoint whose first argument is called again in backward."""
_Run = Callable[..., Any]


@contextmanager
def recomputed_within(surroundings: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Within it, what is checkpointed runs again in `surroundings()`, unless the forward still runs.

    The caller sees to it that one thread at a time is here.
    """
    remembers = getattr(torch.utils.checkpoint, _REMEMBERS)
    is_running = True

    def again(function: _Run) -> _Run:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if is_running:
                return function(*args, **kwargs)
            with surroundings():
                return function(*args, **kwargs)

        return run

    def remember(function: _Run, *args: Any, **kwargs: Any) -> Any:
        return remembers(again(function), *args, **kwargs)

    setattr(torch.utils.checkpoint, _REMEMBERS, remember)
    try:
        yield
    finally:
        is_running = False
        setattr(torch.utils.checkpoint, _REMEMBERS, remembers)
