"""Autocast while PyTorch traces: as in eager in forward, and off where what it did is recorded already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_autocast() -> Iterator[None]:
    """Turn autocast off, as eager does for backward."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def cached_casts() -> Iterator[None]:
    """Cast a parameter once, however often it is read, as autocast does in eager; `make_fx` turns that off.

    The gradients of its readers are then added in the lower precision. No cast is kept beyond the context.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()
