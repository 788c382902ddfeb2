"""A run whose configuration, data and model have been found to be usable, before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging as transformers_logging

from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.finetune.batch_sizes import BatchSizes, batch_sizes
from thunder_memsave.finetune.class_spec import checked_init_args, import_class
from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.launch import world_size
from thunder_memsave.finetune.model import build_model, load_tokenizer
from thunder_memsave.finetune.prepare import PreparedData, prepare_data
from thunder_memsave.finetune.run_directory import (
    RunDirectory,
    check_same_values,
    checkpoint_to_resume,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run whose configuration, data and model have been found to be usable."""

    config: RunConfig
    directory: RunDirectory
    batch_sizes: BatchSizes
    tokenizer: Any
    data: PreparedData
    model: nn.Module
    resume_from: CheckpointInfo | None


def prepare(config: RunConfig) -> Job:
    """Check and load everything that a run needs, without writing and without other processes.

    Raises:
        ConfigError: something cannot be used.
    """
    transformers_logging.disable_progress_bar()  # the run has its own
    resume_from = checkpoint_to_resume(config)
    _check_optimizer(config)
    tokenizer = load_tokenizer(config.model)
    data = prepare_data(config, tokenizer)
    if resume_from is not None:
        check_same_values(resume_from, identity(config, data))
    return Job(
        config=config,
        directory=RunDirectory(root=Path(config.output_dir)),
        batch_sizes=batch_sizes(config.train, world_size=world_size(config)),
        tokenizer=tokenizer,
        data=data,
        model=build_model(config, tokenizer),
        resume_from=resume_from,
    )


def identity(config: RunConfig, data: PreparedData) -> dict[str, int | str]:
    """Collect what gives a step and its state their meaning; it must not change in a run."""
    sizes = batch_sizes(config.train, world_size=world_size(config))
    return {
        "optimizer_class": config.optimizer["class_path"].rpartition(".")[2],
        "seed": config.train.seed,
        "global_batch_size": sizes.global_batch_size,
        "num_rows": len(data.train),
    }


def _check_optimizer(config: RunConfig) -> None:
    cls = import_class(config.optimizer, where="optimizer", default_module="torch.optim")
    checked_init_args(cls, config.optimizer, where="optimizer", given_by_us=1)
