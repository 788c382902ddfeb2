"""Checks what a run file refers to besides its data and its model: classes, devices, the directory."""

from __future__ import annotations

import inspect
import os
from functools import partial
from pathlib import Path

import torch
from torch import nn

from thunder_memsave.finetune.model.adapters import check_adapter
from thunder_memsave.finetune.run_file.callback_hooks import check_hooks
from thunder_memsave.finetune.run_file.classes.class_kinds import (
    CALLBACK,
    DATASET,
    LOGGER,
    OPTIMIZER,
    check_class,
)
from thunder_memsave.finetune.run_file.classes.class_spec import build, import_class
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.finetune.run_file.launch import is_under_torchrun
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.finetune.training.optimizer import make_optimizer
from thunder_memsave.settings.problems import ConfigError


def check_references(config: RunConfig, problems: Problems) -> None:
    """Report what cannot be used, before anything is created."""
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
    reads = ("optimizer", "model.trainable_dtype")
    problems.check(lambda: _check_optimizer(config), reads=reads, about="optimizer")
    problems.check(lambda: check_adapter(config), reads=("lora", "adapter"), about="lora")
    problems.check(lambda: _check_devices(config), reads=("devices",), about="devices")
    problems.check(lambda: _check_output(config), reads=("output_dir",), about="output_dir")


def _check_callback(spec: ClassSpec, *, where: str) -> None:
    """Check the hooks, and create a callback of ours, which writes nothing and checks its arguments."""
    module = CALLBACK.default_module
    cls = import_class(spec, where=where, default_module=module)
    check_hooks(cls, where=where)
    if cls.__module__.startswith(f"{module}."):
        takes = inspect.signature(cls).parameters
        filled = {name: os.curdir for name in CALLBACK.filled if name in takes}
        arguments = {**filled, **(spec.get("init_args") or {})}
        whole = ClassSpec(class_path=spec["class_path"], init_args=arguments)
        build(whole, where=where, default_module=module)


def _check_optimizer(config: RunConfig) -> None:
    """Create the optimizer for one weight and take a step: some check their arguments only then."""
    weight = nn.Parameter(torch.zeros(2, 2, dtype=getattr(torch, config.model.trainable_dtype)))
    weight.grad = torch.ones_like(weight)
    optimizer = make_optimizer(config, [weight], device_type="meta")
    name = config.optimizer["class_path"]
    try:
        optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"optimizer.class_path is {name!r}, which cannot take a step here: {error}; choose another."
        raise ConfigError(message, key="optimizer.class_path") from error
    if not weight.isfinite().all():
        message = (
            f"optimizer: the first step of {name} is not finite; check its arguments, such as lr."
        )
        raise ConfigError(message, key="optimizer.init_args")


def _check_devices(config: RunConfig) -> None:
    num_gpus = torch.cuda.device_count()
    # Under torchrun they were compared with its number before.
    if config.devices != "auto" and not is_under_torchrun() and 0 < num_gpus < config.devices:
        raise ConfigError(
            f"devices is {config.devices}, but this machine has {num_gpus} GPUs; write {num_gpus}, "
            "or 'auto'.",
            key="devices",
        )


def _check_output(config: RunConfig) -> None:
    """Refuse a directory that cannot be created: a run writes its first files only after minutes."""
    if config.output_dir.startswith("~") or "$" in config.output_dir:
        raise ConfigError(
            f"output_dir is {config.output_dir!r}, but '~' and '$' are not expanded here; write the "
            "whole path."
        )
    nearest = Path(config.output_dir).absolute()
    # A dangling link does not exist, but nothing can be created in its place either.
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        what = "is a file" if nearest.exists() else "is a link to nothing"
        raise ConfigError(
            f"cannot write to output_dir {config.output_dir}: {nearest} {what}; name a directory."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"cannot write to output_dir {config.output_dir}: {nearest} is not writable."
        )
