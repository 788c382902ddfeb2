"""A budget limits what is reserved on CUDA, and bytes of tensors elsewhere or where nothing can be simulated."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from thunder_memsave.budget.limits import Limit, limits_reserved
from thunder_memsave.budget.planned_call import PlannedCall
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


def test_the_process_is_held_to_a_budget_that_counts_on_an_emptied_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    properties = SimpleNamespace(total_memory=1000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    limit = Limit(MemoryConfig(), device("h200"), 400)
    limit.enforce(cast(PlannedCall, SimpleNamespace(empties_cache=False)))
    assert fractions == []
    with caplog.at_level(logging.WARNING):
        limit.enforce(cast(PlannedCall, SimpleNamespace(empties_cache=True)))
    assert fractions == [0.4]
    assert "a larger budget, or a smaller micro-batch, makes steps faster" in caplog.text
