"""Hooks on tensors that autograd saves, such as those of an eager checkpoint, which tracing must not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_autograd: Any = torch._C._autograd


@contextmanager
def no_saved_tensors_hooks() -> Iterator[None]:
    """Leave the hooks out inside: they are for what runs, and a checkpoint's end its recomputation by an exception."""
    hooks = []
    while (pair := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(*pair)
