"""Finds settings of a run that are out of range or contradict each other, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from thunder_memsave.finetune.batch_sizes import batch_sizes
from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.launch import world_size
from thunder_memsave.settings import ConfigError

# Fabric lets these replace what its constructor was given, without a word.
_FABRIC_VARIABLES = ("LT_STRATEGY", "LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION")


def config_problems(config: RunConfig) -> Iterator[str]:
    """Yield one sentence for each setting that cannot work."""
    yield from _missing(config)
    yield from _out_of_range(config)
    yield from _batch_problems(config)
    yield from _dtype_problems(config)
    yield from _resume_problems(config)
    yield from _environment_problems()


def _missing(config: RunConfig) -> Iterator[str]:
    if not config.model.name_or_path:
        yield "model.name_or_path is missing; name the directory of a model or of a tokenizer."
    if not config.data.dataset.get("class_path"):
        yield "data.dataset.class_path is missing; name a dataset class, such as PromptJSONL."
    if not config.output_dir:
        yield "output_dir is missing; name a directory for this run, such as runs/first."
    if not config.optimizer.get("class_path"):
        yield "optimizer.class_path is missing; write torch.optim.AdamW, or leave the section out."


def _out_of_range(config: RunConfig) -> Iterator[str]:
    train, scheduler, checkpoint = config.train, config.lr_scheduler, config.checkpoint
    if config.data.max_seq_length < 2:
        yield (
            f"data.max_seq_length is {config.data.max_seq_length}, but must be at least 2: a token "
            "and the one that it predicts."
        )
    positive = {
        "train.global_batch_size": train.global_batch_size,
        "train.micro_batch_size": train.micro_batch_size,
        "train.gradient_accumulation_steps": train.gradient_accumulation_steps,
        "train.epochs": train.epochs,
        "train.max_steps": train.max_steps,
        "eval.every_n_steps": config.eval.every_n_steps,
        "eval.max_batches": config.eval.max_batches,
        "checkpoint.every_n_steps": checkpoint.every_n_steps,
        "checkpoint.keep_last": checkpoint.keep_last,
    }
    for name, value in positive.items():
        if value is not None and value < 1:
            yield f"{name} is {value}, but must be at least 1."
    if train.max_grad_norm is not None and train.max_grad_norm <= 0:
        yield f"train.max_grad_norm is {train.max_grad_norm}; write null for no clipping."
    if scheduler.warmup_steps < 0:
        yield f"lr_scheduler.warmup_steps is {scheduler.warmup_steps}, but must not be negative."
    if scheduler.warmup_steps > 1 and scheduler.warmup_steps != int(scheduler.warmup_steps):
        yield (
            f"lr_scheduler.warmup_steps is {scheduler.warmup_steps}; write a whole number of steps "
            "or a fraction of the run below 1."
        )
    if scheduler.min_lr_ratio is not None and not 0 <= scheduler.min_lr_ratio <= 1:
        yield f"lr_scheduler.min_lr_ratio is {scheduler.min_lr_ratio}, but must be from 0 to 1."


def _batch_problems(config: RunConfig) -> Iterator[str]:
    train = config.train
    given = (train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps)
    if any(value is not None and value < 1 for value in given):
        return
    try:
        batch_sizes(train, world_size=world_size(config))
    except ConfigError as error:
        yield str(error)


def _dtype_problems(config: RunConfig) -> Iterator[str]:
    if config.model.dtype == "float32" and config.model.trainable_dtype != "float32":
        yield (
            f"model.trainable_dtype is {config.model.trainable_dtype} with model.dtype float32; "
            "trained weights cannot be less precise than the computation: write float32."
        )


def _resume_problems(config: RunConfig) -> Iterator[str]:
    if config.resume is True:
        yield "resume is true; write 'auto' for the newest checkpoint, or a checkpoint's path."


def _environment_problems() -> Iterator[str]:
    for name in _FABRIC_VARIABLES:
        if name in os.environ and "LT_CLI_USED" not in os.environ:
            yield (
                f"the environment variable {name}={os.environ[name]} contradicts this command, "
                "which takes the processes from torchrun and the rest from the run file; unset it."
            )
    if "LT_CLI_USED" in os.environ:
        yield "this command was launched by `fabric run`; launch it with torchrun instead."
