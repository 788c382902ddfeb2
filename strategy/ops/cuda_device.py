"""Says which compute capability a trace for CUDA is for: that of a plan's device, or of this machine's GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Capability = tuple[int, int]

_OF_A_PLAN: Capability = (8, 0)
"""The capability of plans that name no device: the least that runs flash attention."""

_planned: ContextVar[Capability | None] = ContextVar("planned_capability", default=None)


@contextmanager
def planned_for(capability: Capability | None) -> Iterator[None]:
    """Trace for a GPU of this capability inside, whichever is here; None: for the one that is here."""
    token = _planned.set(capability)
    try:
        yield
    finally:
        _planned.reset(token)


def is_here() -> bool:
    """Return whether the GPU that is traced for is in this machine, and none was named for a plan."""
    return _planned.get() is None and torch.cuda.is_available()


def capability_of(index: int | None) -> Capability:
    """Return the compute capability that is planned for, or else that of a GPU by its index."""
    planned = _planned.get()
    if planned is not None:
        return planned
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else _OF_A_PLAN
