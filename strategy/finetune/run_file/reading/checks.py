"""Finds settings of a run that are out of range or contradict each other, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.run_file.config import (
    CheckpointConfig,
    GuardsConfig,
    PreferenceConfig,
    RunConfig,
)
from thunder_memsave.finetune.run_file.launch import is_under_torchrun, num_local_processes
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.fsspec_address import is_address, require_address
from thunder_memsave.settings.problems import ConfigError, MissingKeyError

# Fabric silently lets these replace the arguments of its constructor.
_FABRIC_VARIABLES = ("LT_STRATEGY", "LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION")


_ADVICE = {
    "model.name_or_path": "; name a directory, or a model of the Hugging Face hub such as Qwen/Qwen3-1.7B",
    "data.dataset.class_path": "; name a dataset class, such as ChatJSONL",
    "output_dir": "; name a directory for this run, such as runs/first",
    "optimizer.class_path": "; write torch.optim.AdamW, or leave the section out",
}


def check_config(config: RunConfig, problems: Problems) -> None:
    """Report every setting that cannot work, unless a key that it depends on is wrong already."""
    problems.add(*_missing(config), *_environment_problems())
    for reads, check in _COMBINATIONS.items():
        if not any(problems.is_broken(key) for key in reads):
            problems.add(*check(config))


def _missing(config: RunConfig) -> Iterator[ConfigError]:
    classes = {
        "optimizer": config.optimizer,
        "data.dataset": config.data.dataset,
        **{f"loggers[{index}]": spec for index, spec in enumerate(config.loggers)},
        **{f"callbacks[{index}]": spec for index, spec in enumerate(config.callbacks)},
        **({} if config.adapter is None else {"adapter": config.adapter}),
    }
    wanted = {
        "model.name_or_path": config.model.name_or_path,
        "output_dir": config.output_dir,
        **{f"{where}.class_path": spec.get("class_path") for where, spec in classes.items()},
    }
    for key, value in wanted.items():
        if not value:
            yield MissingKeyError(f"{key} is missing{_ADVICE.get(key, '')}.", key=key)


def _lora_and_adapter(config: RunConfig) -> Iterator[ConfigError]:
    if config.lora is not None and config.adapter is not None:
        yield ConfigError(
            "lora and adapter are both given, but a run trains one of them; remove one.",
            key="adapter",
        )


def _packing(config: RunConfig) -> Iterator[ConfigError]:
    if config.data.max_documents_per_row is not None and not config.data.packing:
        yield ConfigError(
            f"data.max_documents_per_row is {config.data.max_documents_per_row}, but without data.packing each row "
            "has one document; set data.packing: true, or leave data.max_documents_per_row out.",
            key="data.max_documents_per_row",
        )


def _preference(config: RunConfig) -> Iterator[ConfigError]:
    section = config.preference
    if section is None:
        return
    for name in ("desirable_weight", "undesirable_weight"):
        value = getattr(section, name)
        if value != getattr(PreferenceConfig(), name) and section.loss != "kto":
            yield ConfigError(
                f"preference.{name} is {value:g}, which only preference.loss: kto has; leave it out.",
                key=f"preference.{name}",
            )
    if config.data.train_on == "all":
        yield ConfigError(
            "data.train_on is 'all', but preferences are about what an assistant wrote; leave it out.",
            key="data.train_on",
        )
    if section.loss != "kto" and config.data.max_documents_per_row == 1:
        yield ConfigError(
            f"data.max_documents_per_row is 1, but both texts of a pair for preference.loss: {section.loss} share a "
            "row; write 2 or more, or data.packing: false.",
            key="data.max_documents_per_row",
        )


def _guards(config: RunConfig) -> Iterator[ConfigError]:
    strategy, guards = config.strategy.nonfinite_gradients, config.guards.nonfinite
    if strategy != "ignore" and guards not in ("stop", strategy):
        yield ConfigError(
            f"guards.nonfinite is {guards!r} and strategy.nonfinite_gradients {strategy!r}; leave the second out, "
            "which is for scripts.",
            key="guards.nonfinite",
        )
    if strategy == "skip" and config.guards.max_skips != GuardsConfig().max_skips:
        yield ConfigError(
            f"guards.max_skips is {config.guards.max_skips}, but strategy.nonfinite_gradients 'skip' leaves out steps "
            "without end; write guards.nonfinite: skip instead of it.",
            key="guards.max_skips",
        )


def _in_backward(config: RunConfig) -> Iterator[ConfigError]:
    if config.memory.optimizer_in_backward is not True:
        return
    why = (
        "but memory.optimizer_in_backward updates each weight before the other gradients are there"
    )
    if config.train.max_grad_norm is not None:
        yield ConfigError(
            f"train.max_grad_norm is {config.train.max_grad_norm:g}, {why}, so none can be clipped; set "
            "train.max_grad_norm: null, or leave optimizer_in_backward out.",
            key="train.max_grad_norm",
        )
    for name in ("nonfinite", "loss_spike"):
        if getattr(config.guards, name) == "skip":
            yield ConfigError(
                f"guards.{name} is 'skip', {why}, so a step cannot be left out; set guards.{name} to stop or rollback, "
                "or leave optimizer_in_backward out.",
                key=f"guards.{name}",
            )


def _spikes(config: RunConfig) -> Iterator[ConfigError]:
    guards, default = config.guards, GuardsConfig()
    if guards.loss_spike is not None:
        return
    for name in ("spike_window", "spike_threshold"):
        value = getattr(guards, name)
        if value != getattr(default, name):
            yield ConfigError(
                f"guards.{name} is {value:g}, but guards.loss_spike is null, so spikes are not detected; set "
                f"guards.loss_spike to stop, skip or rollback, or leave guards.{name} out.",
                key=f"guards.{name}",
            )


def _rollback(config: RunConfig) -> Iterator[ConfigError]:
    if config.checkpoint.every_n_steps is not None:
        return
    for name in ("nonfinite", "loss_spike"):
        if getattr(config.guards, name) == "rollback":
            yield ConfigError(
                f"guards.{name} is 'rollback', but checkpoint.every_n_steps is null, so that there is no checkpoint to "
                "go back to before the end; set checkpoint.every_n_steps.",
                key=f"guards.{name}",
            )


def _name(config: RunConfig) -> Iterator[ConfigError]:
    if is_address(config.model.name_or_path):
        yield from _address(config.model.name_or_path, key="model.name_or_path")


def _revision(config: RunConfig) -> Iterator[ConfigError]:
    model = config.model
    if model.revision is not None and Path(model.name_or_path).is_dir():
        yield ConfigError(
            f"model.revision is {model.revision!r}, but {model.name_or_path} is a directory, which "
            "has no revisions; remove it.",
            key="model.revision",
        )


def _dtypes(config: RunConfig) -> Iterator[ConfigError]:
    model = config.model
    if model.dtype == "float32" and model.trainable_dtype != "float32":
        yield ConfigError(
            f"model.trainable_dtype is {model.trainable_dtype} with model.dtype float32; "
            "trained weights cannot be less precise than the computation: write float32.",
            key="model.trainable_dtype",
        )


def _architecture(config: RunConfig) -> Iterator[ConfigError]:
    if config.model.config is not None and config.model.architecture is not None:
        yield ConfigError(
            "model.config and model.architecture are both given; write model.config for random weights, or "
            "model.architecture for what the named model's own config says.",
            key="model.architecture",
        )


def _scheduler(config: RunConfig) -> Iterator[ConfigError]:
    scheduler = config.lr_scheduler
    if scheduler.name == "constant" and scheduler.min_lr_ratio is not None:
        yield ConfigError(
            f"lr_scheduler.min_lr_ratio is {scheduler.min_lr_ratio}, but a constant learning rate "
            "never reaches it; remove it, or choose cosine or linear.",
            key="lr_scheduler.min_lr_ratio",
        )


def _keep_best(config: RunConfig) -> Iterator[ConfigError]:
    checkpoint, evaluated = config.checkpoint, config.eval.every_n_steps
    if not checkpoint.keep_best:
        if checkpoint.best_of != CheckpointConfig().best_of:
            yield ConfigError(
                f"checkpoint.best_of is {checkpoint.best_of!r}, but no checkpoint is kept for it; set "
                "checkpoint.keep_best to 1.",
                key="checkpoint.best_of",
            )
        return
    if checkpoint.every_n_steps is None:
        yield ConfigError(
            f"checkpoint.keep_best is {checkpoint.keep_best}, but checkpoint.every_n_steps is null, so that there is "
            "one checkpoint alone; set checkpoint.every_n_steps, or leave checkpoint.keep_best out.",
            key="checkpoint.keep_best",
        )
    elif evaluated is None or checkpoint.every_n_steps % evaluated:
        yield ConfigError(
            f"checkpoint.keep_best compares evaluations at the steps of checkpoints, but those come every "
            f"{checkpoint.every_n_steps} steps and eval.every_n_steps is {evaluated or 'null'}; set "
            f"eval.every_n_steps to {checkpoint.every_n_steps}, or to a divisor of it.",
            key="eval.every_n_steps",
        )


def _asynchronous(config: RunConfig) -> Iterator[ConfigError]:
    if config.checkpoint.asynchronous and config.checkpoint.every_n_steps is None:
        yield ConfigError(
            "checkpoint.asynchronous is true, but checkpoint.every_n_steps is null, and the end of a run waits for "
            "its checkpoint; set checkpoint.every_n_steps, or leave checkpoint.asynchronous out.",
            key="checkpoint.asynchronous",
        )
    if config.checkpoint.asynchronous and config.strategy.state_dict_type == "full":
        yield ConfigError(
            "checkpoint.asynchronous is true, but strategy.state_dict_type is 'full', which gathers whole tensors "
            "while it writes; leave one of the two out.",
            key="checkpoint.asynchronous",
        )


def _resume(config: RunConfig) -> Iterator[ConfigError]:
    if config.resume is True or config.resume == "":
        yield ConfigError(
            f"resume is {str(config.resume).lower()!r}; write auto for the newest checkpoint, or a "
            "checkpoint's path.",
            key="resume",
        )
    if is_address(config.resume):
        yield from _address(str(config.resume), key="resume")


def _copy_to(config: RunConfig) -> Iterator[ConfigError]:
    if config.checkpoint.copy_to is not None:
        yield from _address(config.checkpoint.copy_to, key="checkpoint.copy_to")


def _address(address: str, *, key: str) -> Iterator[ConfigError]:
    try:
        require_address(address, key=key)
    except ConfigError as error:
        yield error


def _devices(config: RunConfig) -> Iterator[ConfigError]:
    if is_under_torchrun() and config.devices not in ("auto", num_local_processes(config)):
        yield ConfigError(
            f"devices is {config.devices}, but torchrun started {num_local_processes(config)} "
            "processes on this machine; remove devices, or make them equal.",
            key="devices",
        )


# Checks of settings that depend on each other, by the keys that they read.
_COMBINATIONS: dict[tuple[str, ...], Callable[[RunConfig], Iterator[Any]]] = {
    ("strategy", "guards.nonfinite", "guards.max_skips"): _guards,
    ("memory", "train.max_grad_norm", "guards.nonfinite", "guards.loss_spike"): _in_backward,
    ("guards.loss_spike", "guards.spike_window", "guards.spike_threshold"): _spikes,
    ("guards.nonfinite", "guards.loss_spike", "checkpoint.every_n_steps"): _rollback,
    ("preference", "data.train_on", "data.max_documents_per_row"): _preference,
    ("lora", "adapter"): _lora_and_adapter,
    ("data.packing", "data.max_documents_per_row"): _packing,
    ("model.name_or_path",): _name,
    ("model.name_or_path", "model.revision"): _revision,
    ("model.dtype", "model.trainable_dtype"): _dtypes,
    ("model.config", "model.architecture"): _architecture,
    ("lr_scheduler.name", "lr_scheduler.min_lr_ratio"): _scheduler,
    ("checkpoint.keep_best", "checkpoint.every_n_steps", "eval.every_n_steps"): _keep_best,
    ("checkpoint.asynchronous", "checkpoint.every_n_steps", "strategy"): _asynchronous,
    ("checkpoint.copy_to",): _copy_to,
    ("resume",): _resume,
    ("devices",): _devices,
}


def _environment_problems() -> Iterator[ConfigError]:
    for name in _FABRIC_VARIABLES:
        if name in os.environ and "LT_CLI_USED" not in os.environ:
            yield ConfigError(
                f"the environment variable {name}={os.environ[name]} contradicts this command, "
                "which takes the processes from torchrun and the rest from the run file; unset it."
            )
    if "LT_CLI_USED" in os.environ:
        yield ConfigError(
            "this command was launched by `fabric run`; launch it with torchrun instead."
        )
    num_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks != "1" and not is_under_torchrun():
        yield ConfigError(
            f"srun started {num_tasks} tasks, each of which would be a run of its own; start one "
            "torchrun per machine by srun (srun --ntasks-per-node=1 torchrun ...), or one task with "
            "--devices=N."
        )
