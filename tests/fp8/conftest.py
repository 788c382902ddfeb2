"""TransformerEngine for tests of fp8, on a machine without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from harness import te_on_cpu
from thunder_memsave.fp8.kernels import te_backend


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """TransformerEngine's own Python with emulated kernels, which our backend takes for the real one."""
    with te_on_cpu.transformer_engine() as pytorch:
        te_backend._library.cache_clear()
        monkeypatch.setattr(te_backend, "DEVICE_TYPES", frozenset({"cuda", "cpu"}))
        yield pytorch
        te_backend._library.cache_clear()
