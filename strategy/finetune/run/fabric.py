"""Builds Fabric for a run: devices from torchrun, precision from the dtypes of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from thunder_memsave.finetune.model.build import precision_of
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.launch import (
    is_under_torchrun,
    num_local_processes,
    world_size,
)
from thunder_memsave.strategy import ThunderMemsaveStrategy


def build_fabric(
    config: RunConfig, *, callbacks: Sequence[object], loggers: Sequence[Any] = ()
) -> Fabric:
    """Make Fabric with our strategy, on the number of processes from torchrun or `devices`."""
    num_local = num_local_processes(config)
    return Fabric(
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        devices=num_local,
        num_nodes=world_size(config) // num_local,
        strategy=ThunderMemsaveStrategy(
            **asdict(config.strategy),
            memory=config.memory,
            fp8=config.fp8,
            frozen_weights=config.model.frozen_weights,
        ),
        precision=precision_of(config),  # type: ignore[arg-type]
        callbacks=list(callbacks),
        loggers=list(loggers),
        # Given explicitly, because Fabric would take the tasks of a SLURM job for the processes of the run.
        plugins=[TorchElasticEnvironment() if is_under_torchrun() else LightningEnvironment()],
    )
