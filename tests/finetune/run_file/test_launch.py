from __future__ import annotations

import pytest

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.launch import (
    is_first_local,
    is_under_torchrun,
    num_local_processes,
    world_size,
)


def test_alone_a_run_has_one_process_without_gpus_and_one_per_gpu_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not is_under_torchrun()
    for num_gpus, expected in ((0, 1), (1, 1), (8, 8)):
        monkeypatch.setattr("torch.cuda.device_count", lambda num_gpus=num_gpus: num_gpus)
        assert num_local_processes(RunConfig()) == world_size(RunConfig()) == expected


def test_devices_says_how_many_processes_a_machine_has() -> None:
    assert num_local_processes(RunConfig(devices=3)) == world_size(RunConfig(devices=3)) == 3


def test_under_torchrun_its_numbers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert is_under_torchrun()
    assert (num_local_processes(RunConfig()), world_size(RunConfig())) == (2, 4)


def test_the_first_process_of_a_machine_speaks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_first_local()
    for rank, is_first in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert is_first_local() == is_first
