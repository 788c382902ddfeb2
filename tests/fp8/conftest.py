"""TransformerEngine for tests of fp8, on a machine without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Literal

import pytest

from harness import te_on_cpu
from thunder_memsave.fp8.kernels import te_backend, te_library


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """TransformerEngine's own Python with emulated kernels, which our backend takes for the real one."""
    with _found_on("Hopper", monkeypatch) as pytorch:
        yield pytorch


@pytest.fixture
def transformer_engine_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The same where it finds a chip that computes MXFP8."""
    with _found_on("Blackwell", monkeypatch) as pytorch:
        yield pytorch


@contextmanager
def _found_on(
    chip: Literal["Hopper", "Blackwell"], monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    with te_on_cpu.transformer_engine(chip) as pytorch:
        te_library.loaded.cache_clear()
        monkeypatch.setattr(te_backend, "DEVICE_TYPES", frozenset({"cuda", "cpu"}))
        yield pytorch
        te_library.loaded.cache_clear()
