"""Says which device a graph is traced for: that of a plan, which may be absent, or the one that the tensors are on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

Capability = tuple[int, int]

_LEAST: Capability = (8, 0)
"""The capability of plans that name no device: the least that runs flash attention."""


_Planned = tuple[torch.device | None, Capability | None]

_planned: ContextVar[_Planned] = ContextVar("planned", default=(None, None))


@contextmanager
def planned_for(device: torch.device | None, capability: Capability | None) -> Iterator[None]:
    """Trace for another device inside.

    Args:
        device: Where all tensors are taken to be; None: where they are.
        capability: Of the GPU; None: that of the one that is here.
    """
    token = _planned.set((device, capability))
    try:
        yield
    finally:
        _planned.reset(token)


def device_of(tensor: Tensor) -> torch.device:
    """Return where a tensor is when the graph runs."""
    device, _ = _planned.get()
    return device or tensor.device


def is_here() -> bool:
    """Return whether the GPU that is traced for is in this machine, and none was named for a plan."""
    _, planned = _planned.get()
    return planned is None and torch.cuda.is_available()


def capability_of(index: int | None) -> Capability:
    """Return the compute capability that is planned for, or else that of a GPU by its index."""
    _, planned = _planned.get()
    if planned is not None:
        return planned
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else _LEAST
