"""Finds settings of a run that are out of range or contradict each other, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.run_file.config import CheckpointConfig, GuardsConfig, RunConfig
from thunder_memsave.finetune.run_file.launch import is_under_torchrun, num_local_processes
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.section import ConfigError

# Fabric silently lets these replace the arguments of its constructor.
_FABRIC_VARIABLES = ("LT_STRATEGY", "LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION")


_MOST = 2**31 - 1
"""Largest count: more is a mistake, and lists of so many rows would exhaust memory."""

# Advice for -1, which means no limit in other tools.
_NO_LIMIT = "; leave it out, or write null, for no limit"
_UNLIMITED = {
    "train.epochs": _NO_LIMIT,
    "train.max_steps": _NO_LIMIT,
    "eval.max_batches": "; write null for the whole validation set",
    "eval.every_n_steps": "; write null for the start and the end only",
    "checkpoint.every_n_steps": "; write null for the end only",
    "devices": "; write 'auto' for all GPUs",
}


def check_config(config: RunConfig, problems: Problems) -> None:
    """Report every setting that cannot work, unless a key that it depends on is wrong already."""
    problems.add(*_missing(config), *_environment_problems())
    problems.add(
        *(each for each in _out_of_range(config) if not problems.is_broken(each.key or ""))
    )
    for reads, check in _COMBINATIONS.items():
        if not any(problems.is_broken(key) for key in reads):
            problems.add(*check(config))


def _missing(config: RunConfig) -> Iterator[ConfigError]:
    wanted = {
        "model.name_or_path": (
            config.model.name_or_path,
            "name a directory, or a model of the Hugging Face hub such as Qwen/Qwen3-1.7B.",
        ),
        "data.dataset.class_path": (
            config.data.dataset.get("class_path"),
            "name a dataset class, such as ChatJSONL.",
        ),
        "output_dir": (config.output_dir, "name a directory for this run, such as runs/first."),
        "optimizer.class_path": (
            config.optimizer.get("class_path"),
            "write torch.optim.AdamW, or leave the section out.",
        ),
    }
    for key, (value, advice) in wanted.items():
        if not value:
            yield ConfigError(f"{key} is missing; {advice}", key=key)


def _out_of_range(config: RunConfig) -> Iterator[ConfigError]:
    train, scheduler, checkpoint = config.train, config.lr_scheduler, config.checkpoint
    at_least_one = {
        "train.global_batch_size": train.global_batch_size,
        "train.micro_batch_size": train.micro_batch_size,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train.epochs": train.epochs,
        "train.max_steps": train.max_steps,
        "eval.every_n_steps": config.eval.every_n_steps,
        "eval.max_batches": config.eval.max_batches,
        "checkpoint.every_n_steps": checkpoint.every_n_steps,
        "checkpoint.keep_last": checkpoint.keep_last,
        "guards.spike_window": config.guards.spike_window,
        "devices": None if config.devices == "auto" else config.devices,
    }
    for key, value in at_least_one.items():
        if value is not None and value < 1:
            unlimited = _UNLIMITED.get(key, "") if value == -1 else ""
            yield _wrong(key, value, f"must be at least 1{unlimited}")
        elif value is not None and value > _MOST:
            yield _wrong(key, value, f"must be at most {_MOST}")
    if config.data.max_seq_length < 2:
        what = "must be at least 2: a token and the one that it predicts"
        yield _wrong("data.max_seq_length", config.data.max_seq_length, what)
    if train.max_grad_norm is not None and not train.max_grad_norm > 0:
        what = "must be above 0; write null for no clipping"
        yield _wrong("train.max_grad_norm", train.max_grad_norm, what)
    if not 0 <= train.seed < 2**32:
        yield _wrong("train.seed", train.seed, "must be from 0 to 4294967295")
    if config.guards.max_skips < 0:
        what = "must not be negative; 0 ends the run at the first bad step"
        yield _wrong("guards.max_skips", config.guards.max_skips, what)
    if not 0 < config.guards.spike_threshold < float("inf"):
        what = "must be above 0 and finite; for no limit, guards.loss_spike: null"
        yield _wrong("guards.spike_threshold", config.guards.spike_threshold, what)
    yield from _warmup(scheduler.warmup_steps)
    ratio = scheduler.min_lr_ratio
    if ratio is not None and not 0 <= ratio <= 1:
        yield _wrong("lr_scheduler.min_lr_ratio", ratio, "must be from 0 to 1")


def _warmup(steps: float) -> Iterator[ConfigError]:
    key = "lr_scheduler.warmup_steps"
    if not 0 <= steps < float("inf"):
        yield _wrong(key, steps, "must not be negative")
    elif steps > 1 and steps != int(steps):
        what = "must be a whole number of steps or a fraction of the run below 1"
        yield _wrong(key, steps, what)


def _wrong(key: str, value: object, what: str) -> ConfigError:
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    return ConfigError(f"{key} is {value}, but {what}.", key=key)


def _lora_and_adapter(config: RunConfig) -> Iterator[ConfigError]:
    if config.lora is not None and config.adapter is not None:
        yield ConfigError(
            "lora and adapter are both given, but a run trains one of them; remove one.",
            key="adapter",
        )


def _guards(config: RunConfig) -> Iterator[ConfigError]:
    strategy, guards = config.strategy.get("nonfinite_gradients", "ignore"), config.guards.nonfinite
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
    if checkpoint.keep_best < 0:
        yield _wrong("checkpoint.keep_best", checkpoint.keep_best, "must not be negative")
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
    if config.checkpoint.asynchronous and config.strategy.get("state_dict_type") == "full":
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
    ("guards.loss_spike", "guards.spike_window", "guards.spike_threshold"): _spikes,
    ("guards.nonfinite", "guards.loss_spike", "checkpoint.every_n_steps"): _rollback,
    ("lora", "adapter"): _lora_and_adapter,
    ("model.name_or_path", "model.revision"): _revision,
    ("model.dtype", "model.trainable_dtype"): _dtypes,
    ("model.config", "model.architecture"): _architecture,
    ("lr_scheduler.name", "lr_scheduler.min_lr_ratio"): _scheduler,
    ("checkpoint.keep_best", "checkpoint.every_n_steps", "eval.every_n_steps"): _keep_best,
    ("checkpoint.asynchronous", "checkpoint.every_n_steps", "strategy"): _asynchronous,
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
