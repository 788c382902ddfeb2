"""`train.deterministic` allows only kernels with the same bits every time, from before CUDA starts to the end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from thunder_memsave.finetune.process.deterministic import deterministic_kernels
from thunder_memsave.finetune.run import train as train_module
from thunder_memsave.finetune.run_file.config import RunConfig, TrainConfig

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_a_users_own_workspace_stays_and_all_is_as_before_afterwards(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    if given is not None:
        monkeypatch.setenv(WORKSPACE, given)
    with deterministic_kernels():
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ[WORKSPACE] == (given or ":4096:8")
    assert not torch.are_deterministic_algorithms_enabled()
    assert os.environ.get(WORKSPACE) == given


@pytest.mark.parametrize("asked", [False, True])
def test_a_run_is_deterministic_if_its_file_says_so(
    asked: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[bool] = []

    def run(*_: Any, **options: Any) -> Path:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return tmp_path

    monkeypatch.setattr(train_module, "_train", run)
    train_module.train(RunConfig(train=TrainConfig(deterministic=asked)))
    assert seen == [asked]
    assert not torch.are_deterministic_algorithms_enabled()
