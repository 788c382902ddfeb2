"""Builds Fabric for a run: devices from torchrun, precision from the dtypes of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.fabric.plugins.precision import MixedPrecision, Precision
from typing_extensions import override

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
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    environment = TorchElasticEnvironment() if is_under_torchrun() else LightningEnvironment()
    return Fabric(
        accelerator=device_type,
        devices=num_local,
        num_nodes=world_size(config) // num_local,
        strategy=ThunderMemsaveStrategy(
            **asdict(config.strategy),
            memory=config.memory,
            fp8=config.fp8,
            frozen_weights=config.model.frozen_weights,
        ),
        callbacks=list(callbacks),
        loggers=list(loggers),
        # The first given explicitly, because Fabric would take the tasks of a SLURM job for the processes of the run.
        plugins=[environment, _precision(config, device_type)],
    )


class _Autocast(MixedPrecision):
    """`bf16-mixed` that leaves the inputs of calls as they are.

    Fabric's own casts all floating-point inputs to bfloat16, the sums of log-probabilities that a loss compares with
    too. A language model's own inputs are whole numbers.
    """

    @override
    def convert_input(self, data: Any) -> Any:
        return data


def _precision(config: RunConfig, device_type: str) -> Precision:
    name = precision_of(config)
    return _Autocast("bf16-mixed", device_type) if name == "bf16-mixed" else Precision()
