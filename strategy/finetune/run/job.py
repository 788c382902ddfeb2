"""Checks and loads everything that a run needs, before anything is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from torch import nn
from transformers.utils import logging as transformers_logging

from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.finetune.data.batches import Sharding, num_steps_per_epoch
from thunder_memsave.finetune.data.prepare import PreparedData, prepare_data
from thunder_memsave.finetune.model.build import (
    build_model,
    load_tokenizer,
    with_attention,
)
from thunder_memsave.finetune.model.hub import is_hub_name
from thunder_memsave.finetune.objectives.choose import objective_of
from thunder_memsave.finetune.objectives.objective import Objective
from thunder_memsave.finetune.output.run_directory import RunDirectory, checkpoint_to_resume
from thunder_memsave.finetune.output.same_run import check_same_run
from thunder_memsave.finetune.run.answers import check_answers
from thunder_memsave.finetune.run.callbacks import (
    check_early_stopping,
    check_fp8_monitor,
    check_keep_best,
    check_logger_package,
)
from thunder_memsave.finetune.run.check_references import check_references
from thunder_memsave.finetune.run.check_start import check_named_modules, check_strategy
from thunder_memsave.finetune.run.fp8_shown import bytes_shown, fp8_shown
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes, sizes_of
from thunder_memsave.finetune.run_file.classes.class_kinds import DATASET
from thunder_memsave.finetune.run_file.classes.class_spec import build
from thunder_memsave.finetune.run_file.config import ClassSpec, RunConfig
from thunder_memsave.finetune.run_file.launch import world_size
from thunder_memsave.finetune.run_file.reading.problems import Problems

_BATCH_SIZES = (
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run whose configuration, data and model were checked."""

    config: RunConfig
    directory: RunDirectory
    batch_sizes: BatchSizes
    tokenizer: Any
    data: PreparedData[Any]
    model: nn.Module
    resume_from: CheckpointInfo | None
    identity: dict[str, int | str]
    """Values that give a step and its state their meaning, and must not change within a run."""
    fp8: str | None
    """Description of the linears in fp8, in a few lines; None if fp8 is off."""
    in_bytes: str | None = None
    """Description of the frozen weights in a format of bytes; None if there are none."""

    @property
    def objective(self) -> Objective[Any]:
        """Return what the run trains for."""
        return objective_of(self.config, num_documents=self.data.train.num_documents)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, also if this process holds a shard; a tied one counts once."""
        return sum(_num_elements(p) for p in self.model.parameters())

    @property
    def num_trained_parameters(self) -> int:
        """Weights that are trained."""
        return sum(_num_elements(p) for p in self.model.parameters() if p.requires_grad)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one pass over the data."""
        return num_steps_per_epoch(len(self.data.train), self.sharding(rank=0))

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run; one epoch by default."""
        epochs, max_steps = self.config.train.epochs, self.config.train.max_steps
        if epochs is None and max_steps is None:
            epochs = 1
        limits = [None if epochs is None else epochs * self.steps_per_epoch, max_steps]
        return min(limit for limit in limits if limit is not None)

    def sharding(self, *, rank: int) -> Sharding:
        """Return the division of a global batch, for one rank."""
        return Sharding(
            global_batch_size=self.batch_sizes.global_batch_size,
            micro_batch_size=self.batch_sizes.micro_batch_size,
            rank=rank,
            world_size=world_size(self.config),
        )


def _num_elements(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "unsharded_shape", parameter.shape).numel())


def prepare(config: RunConfig, problems: Problems | None = None) -> Job:
    """Check and load everything that a run needs, without writing and without other processes.

    Args:
        config: The run; invalid keys have their defaults.
        problems: Known problems of the run file; the rest is checked nevertheless.

    Raises:
        ConfigErrors: lists all problems.
    """
    transformers_logging.disable_progress_bar()  # the run has its own
    problems = Problems() if problems is None else problems
    check_references(config, problems)
    check_strategy(config, problems)
    sizes = _sizes(config, problems)
    resume_from = problems.check(
        lambda: checkpoint_to_resume(config),
        reads=("output_dir", "resume", "devices"),
        about="output_dir" if config.resume is False else "resume",
    )
    tokenizer = _tokenizer(config, problems)
    if tokenizer is not None:
        config = _with_attention(config, problems)
    data = _data(config, tokenizer, problems)
    identity = None
    if sizes is not None and data is not None and not problems.is_broken("optimizer"):
        identity = _identity(config, sizes, data)
    if resume_from is not None and identity is not None:
        _check_resumed(resume_from, identity, config, problems)
    _check_callbacks(config, data, problems)
    model = _model(config, tokenizer, problems)
    check_named_modules(config, model, problems)
    fp8, in_bytes = _fp8(config, model, problems), _in_bytes(config, model, problems)
    problems.raise_all()
    assert sizes is not None
    assert data is not None
    assert model is not None
    assert identity is not None
    return Job(
        config=config,
        directory=RunDirectory(root=Path(config.output_dir)),
        batch_sizes=sizes,
        tokenizer=tokenizer,
        data=data,
        model=model,
        resume_from=resume_from,
        identity=identity,
        fp8=fp8,
        in_bytes=in_bytes,
    )


def _sizes(config: RunConfig, problems: Problems) -> BatchSizes | None:
    return problems.check(
        lambda: sizes_of(config, world_size=world_size(config)),
        reads=("devices", "memory", *_BATCH_SIZES),
        about="train.global_batch_size",
    )


def _check_resumed(
    checkpoint: CheckpointInfo,
    identity: Mapping[str, int | str],
    config: RunConfig,
    problems: Problems,
) -> None:
    problems.check(
        lambda: check_same_run(checkpoint, identity, config),
        reads=("train.seed", "model", "lora", "adapter", "fp8"),
        about="resume",
    )


def _identity(
    config: RunConfig, sizes: BatchSizes, data: PreparedData[Any]
) -> dict[str, int | str]:
    return {
        "optimizer_class": config.optimizer["class_path"].rpartition(".")[2],
        "seed": config.train.seed,
        "global_batch_size": sizes.global_batch_size,
        "num_rows": len(data.train),
        "fingerprint_of_rows": data.train.fingerprint,
    }


def _check_callbacks(config: RunConfig, data: PreparedData[Any] | None, problems: Problems) -> None:
    """Check early stopping, loggers and the like without creating objects that write."""
    for index, spec in enumerate(config.loggers):
        where = f"loggers[{index}]"
        step = partial(check_logger_package, spec, where=where)
        problems.check(step, reads=(where,), about=where)
    has_validation = data is None or data.validation is not None
    problems.check(
        lambda: check_early_stopping(config, has_validation=has_validation),
        reads=("callbacks", "eval.every_n_steps"),
        about="callbacks",
    )
    problems.check(
        lambda: check_keep_best(config, has_validation=has_validation),
        reads=("callbacks", "checkpoint"),
        about="checkpoint.keep_best",
    )
    problems.check(
        lambda: check_answers(config, has_validation=has_validation),
        reads=("eval.answers",),
        about="eval.answers",
    )
    problems.check(lambda: check_fp8_monitor(config), reads=("callbacks", "fp8"), about="callbacks")


def _keys(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)


def _tokenizer(config: RunConfig, problems: Problems) -> Any:
    if problems.found and is_hub_name(config.model) and not constants.is_offline_mode():
        return None  # a mistake should be reported before gigabytes are downloaded
    return problems.check(
        lambda: load_tokenizer(config.model),
        reads=_keys("model", "name_or_path", "revision"),
        about="model.name_or_path",
    )


def _with_attention(config: RunConfig, problems: Problems) -> RunConfig:
    found = problems.check(
        lambda: with_attention(config, fetches=True), reads=("model",), about="model.name_or_path"
    )
    return config if found is None else found


def _data(config: RunConfig, tokenizer: Any, problems: Problems) -> PreparedData[Any] | None:
    data, spec = None, config.data.dataset
    if tokenizer is not None:
        data = problems.check(
            lambda: prepare_data(config, tokenizer),
            reads=("data", "train.seed"),
            about="data.dataset",
        )
    if data is None:
        sound = _without_broken_arguments(spec, problems)
        paths = _keys("data.dataset.init_args", "path", "val_path")
        problems.check(
            lambda: _check_rows(sound),
            reads=("data.dataset.class_path", *paths),
            about="data.dataset",
        )
    return data


def _without_broken_arguments(spec: ClassSpec, problems: Problems) -> ClassSpec:
    arguments = {
        name: value
        for name, value in (spec.get("init_args") or {}).items()
        if not problems.is_broken(f"data.dataset.init_args.{name}")
    }
    return {"class_path": spec["class_path"], "init_args": arguments}


def _check_rows(spec: ClassSpec) -> None:
    """Check the rows as far as possible without a tokenizer; a user's class need not support it."""
    dataset = build(spec, where="data.dataset", default_module=DATASET.default_module)
    if hasattr(dataset, "check_rows"):
        dataset.check_rows()


def _model(config: RunConfig, tokenizer: Any, problems: Problems) -> nn.Module | None:
    if tokenizer is None:
        return None
    return problems.check(
        lambda: build_model(_without_broken(config, problems), tokenizer),
        reads=("model",),
        about="model.name_or_path",
    )


def _fp8(config: RunConfig, model: nn.Module | None, problems: Problems) -> str | None:
    if model is None:
        return None
    return problems.check(
        lambda: fp8_shown(config, model),
        reads=("fp8", "model", "lora", "adapter", "strategy", "devices"),
        about="fp8",
    )


def _in_bytes(config: RunConfig, model: nn.Module | None, problems: Problems) -> str | None:
    if model is None:
        return None
    return problems.check(
        lambda: bytes_shown(config, model),
        reads=("model", "lora", "adapter"),
        about="model.frozen_weights",
    )


def _without_broken(config: RunConfig, problems: Problems) -> RunConfig:
    """Leave out invalid parts, so that the rest of the model is checked."""
    if problems.is_broken("lora") or problems.is_broken("adapter"):
        config = dataclasses.replace(config, lora=None, adapter=None)
    if problems.is_broken("data.max_seq_length") or problems.is_broken("data.packing"):
        data = dataclasses.replace(
            config.data, max_seq_length=2, packing=False, max_documents_per_row=None
        )
        config = dataclasses.replace(config, data=data)
    return config
