"""Modes of Thunder and PyTorch in which symbols are recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from thunder.common import CompileData
from thunder.core.langctxs import (
    Languages,
    reset_langctx,
    resolve_language,
    set_langctx,
)


@contextmanager
def in_language() -> Iterator[None]:
    """Operators and methods of proxies mean what they mean in torch."""
    token = set_langctx(resolve_language(Languages.TORCH))
    try:
        yield
    finally:
        reset_langctx(token)


@contextmanager
def differentiated(compile_data: CompileData, *, enabled: bool) -> Iterator[None]:
    """Symbols called with `enabled=False` are constants for Thunder's differentiation."""
    before, compile_data.is_grad_enabled = compile_data.is_grad_enabled, enabled
    try:
        yield
    finally:
        compile_data.is_grad_enabled = before
