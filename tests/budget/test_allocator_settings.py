"""The allocator's segments grow on CUDA, unless the user says otherwise or CUDA has started."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from thunder_memsave.budget.allocator_settings import allocator_environment, set_up_allocator
from thunder_memsave.config import MemoryConfig

CUDA, VARIABLE, SETTING = (
    torch.device("cuda:0"),
    "PYTORCH_CUDA_ALLOC_CONF",
    "expandable_segments:True",
)


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (VARIABLE, "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)
    return seen


def test_on_cuda_segments_grow_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="thunder_memsave.budget.allocator_settings")
    seen = settings(monkeypatch)
    set_up_allocator(MemoryConfig(), CUDA)
    assert seen == [SETTING] == [os.environ[VARIABLE]]
    assert "memory.expandable_segments: false leaves it as it is" in caplog.text


def test_torch_knows_the_setting() -> None:
    set_up_allocator(MemoryConfig(), CUDA)
    with pytest.raises(ValueError, match="True"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:Perhaps")


@pytest.mark.parametrize(
    ("place", "memory", "variable"),
    [
        (torch.device("cpu"), MemoryConfig(), None),
        (CUDA, MemoryConfig(expandable_segments=False), None),
        (CUDA, MemoryConfig(), VARIABLE),
        (CUDA, MemoryConfig(), "PYTORCH_ALLOC_CONF"),
    ],
    ids=["CPU", "switched off", "own settings", "own settings by the other name"],
)
def test_otherwise_nothing_is_set(
    place: torch.device,
    memory: MemoryConfig,
    variable: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    seen, before = settings(monkeypatch), dict(os.environ)
    set_up_allocator(memory, place)
    assert seen == []
    assert dict(os.environ) == before


def test_a_cuda_that_has_started_is_left_alone_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    seen = settings(monkeypatch)
    set_up_allocator(MemoryConfig(), CUDA)
    assert seen == []
    assert VARIABLE not in os.environ
    assert "CUDA has started before the strategy" in caplog.text


def test_a_plan_has_the_settings_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocator_environment(MemoryConfig())[VARIABLE] == SETTING
    assert VARIABLE not in allocator_environment(MemoryConfig(expandable_segments=False))
    monkeypatch.setenv(VARIABLE, "max_split_size_mb:64")
    assert allocator_environment(MemoryConfig())[VARIABLE] == "max_split_size_mb:64"
