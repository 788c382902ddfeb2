"""Checks what a run file names besides its data and its model: classes, devices, the directory."""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path

import torch
from torch import nn

from thunder_memsave.finetune.config import ClassSpec, RunConfig
from thunder_memsave.finetune.launch import is_under_torchrun
from thunder_memsave.finetune.model.adapters import check_adapter
from thunder_memsave.finetune.run_file.class_kinds import (
    CALLBACK,
    DATASET,
    LOGGER,
    OPTIMIZER,
    check_class,
)
from thunder_memsave.finetune.run_file.class_spec import build, import_class
from thunder_memsave.finetune.run_file.problems import Problems
from thunder_memsave.settings import ConfigError


def check_references(config: RunConfig, problems: Problems) -> None:
    """Report what cannot be used, before anything is made of it."""
    places = [
        ("optimizer", config.optimizer, OPTIMIZER),
        ("data.dataset", config.data.dataset, DATASET),
        *((f"loggers[{i}]", spec, LOGGER) for i, spec in enumerate(config.loggers)),
        *((f"callbacks[{i}]", spec, CALLBACK) for i, spec in enumerate(config.callbacks)),
    ]
    for where, spec, kind in places:
        step = partial(check_class, spec, kind, where=where)
        problems.check(step, reads=(where,), about=where)
    for index, spec in enumerate(config.callbacks):
        where = f"callbacks[{index}]"
        step = partial(_check_callback, spec, where=where)
        problems.check(step, reads=(where,), about=where)
    problems.check(lambda: _check_optimizer(config), reads=("optimizer",), about="optimizer")
    problems.check(lambda: check_adapter(config), reads=("lora", "adapter"), about="lora")
    problems.check(lambda: _check_devices(config), reads=("devices",), about="devices")
    problems.check(lambda: _check_output(config), reads=("output_dir",), about="output_dir")


def _check_callback(spec: ClassSpec, *, where: str) -> None:
    """Make a callback of ours, which writes nothing by that and knows which values it takes."""
    module = CALLBACK.default_module
    cls = import_class(spec, where=where, default_module=module)
    if cls.__module__.startswith(f"{module}."):
        takes = inspect.signature(cls).parameters
        filled = {name: os.curdir for name in CALLBACK.filled if name in takes}
        arguments = {**filled, **(spec.get("init_args") or {})}
        whole = ClassSpec(class_path=spec["class_path"], init_args=arguments)
        build(whole, where=where, default_module=module)


def _check_optimizer(config: RunConfig) -> None:
    """Make the optimizer for one weight: only its constructor knows which values it takes."""
    weight = nn.Parameter(torch.zeros(1))
    build(config.optimizer, [weight], where="optimizer", default_module=OPTIMIZER.default_module)


def _check_devices(config: RunConfig) -> None:
    num_gpus = torch.cuda.device_count()
    # Under torchrun they were compared with its number already.
    if config.devices != "auto" and not is_under_torchrun() and 0 < num_gpus < config.devices:
        raise ConfigError(
            f"devices is {config.devices}, but this machine has {num_gpus} GPUs; write {num_gpus}, "
            "or 'auto'.",
            key="devices",
        )


def _check_output(config: RunConfig) -> None:
    """Refuse a directory that cannot be made; a run's files are written after minutes only."""
    nearest = Path(config.output_dir).absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(
            f"cannot write to output_dir {config.output_dir}: {nearest} is a file; name a directory."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cannot write to output_dir {config.output_dir}: {nearest} is not writable."
        )
