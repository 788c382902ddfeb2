from __future__ import annotations

import pytest
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from thunder_memsave.finetune.run.fabric import build_fabric
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.strategy import ThunderMemsaveStrategy


def environment_of(fabric: Fabric) -> object:
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    return fabric.strategy.cluster_environment


@pytest.fixture
def slurm_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a job script with two tasks, of which this process is none."""
    names = {"JOB_ID": 7, "JOB_NAME": "job", "NTASKS": 2, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    for name, value in names.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


@pytest.mark.usefixtures("slurm_job")
def test_the_tasks_of_a_slurm_job_are_not_taken_for_processes_of_the_run() -> None:
    fabric = build_fabric(RunConfig(devices=1), callbacks=[])
    assert isinstance(environment_of(fabric), LightningEnvironment)
    assert fabric.world_size == 1


@pytest.mark.usefixtures("slurm_job")
def test_under_torchrun_its_environment_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    values = {**dict.fromkeys(ranks, "0"), "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    fabric = build_fabric(RunConfig(), callbacks=[])
    assert isinstance(environment_of(fabric), TorchElasticEnvironment)
