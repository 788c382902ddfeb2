"""A budget limits what is reserved on CUDA, and bytes of tensors elsewhere or where nothing can be simulated."""

from __future__ import annotations

import logging

import pytest

from thunder_memsave.budget.limits import limits_reserved
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.devices import device


def test_auto_is_what_the_device_reserves() -> None:
    assert limits_reserved(MemoryConfig(), device("h200"))
    assert not limits_reserved(MemoryConfig(), device("cpu"))
    assert not limits_reserved(MemoryConfig(limits="tensors"), device("h200"))
    assert limits_reserved(MemoryConfig(limits="reserved"), device("cpu"))


def test_an_allocator_that_is_not_simulated_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with caplog.at_level(logging.WARNING):
        assert not limits_reserved(MemoryConfig(), device("h200"))
        assert not limits_reserved(MemoryConfig(), device("h200"))
    (message,) = caplog.messages
    assert "backend:cudaMallocAsync is not simulated" in message
    assert "memory.budget limits bytes of tensors" in message
