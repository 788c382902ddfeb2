"""One run from its configuration to the exported model: the steps in their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer
from transformers.utils import logging as transformers_logging

from thunder_memsave.callbacks import (
    LearningRateMonitor,
    MetricsCSV,
    ModelCheckpoint,
    ProgressBar,
    ThroughputMonitor,
)
from thunder_memsave.callbacks.checkpoint import CheckpointInfo, load_checkpoint
from thunder_memsave.checkpoint.module_state import StateMismatchError
from thunder_memsave.finetune.batches import Sharding, num_steps_per_epoch
from thunder_memsave.finetune.class_spec import build, checked_init_args, import_class
from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.export import export
from thunder_memsave.finetune.fabric import build_fabric
from thunder_memsave.finetune.loop import Plan, fit
from thunder_memsave.finetune.model import build_model, load_tokenizer
from thunder_memsave.finetune.prepare import PreparedData, prepare_data
from thunder_memsave.finetune.run_directory import RunDirectory, checkpoint_to_resume
from thunder_memsave.settings import ConfigError


def train(config: RunConfig) -> Path:
    """Run the whole training and return the directory of the trained model or adapter.

    Everything that a user can get wrong is found before processes join and before anything is
    written.

    Raises:
        ConfigError: the configuration, the data, the model or the checkpoint cannot be used.
    """
    transformers_logging.disable_progress_bar()  # the run has its own
    resume_from = checkpoint_to_resume(config)
    _check_optimizer(config)
    tokenizer = load_tokenizer(config.model)
    data = prepare_data(config, tokenizer)
    model = build_model(config, tokenizer)
    directory = RunDirectory(root=Path(config.output_dir))
    fabric = build_fabric(config, callbacks=_callbacks(config, directory))
    plan = _plan(config, data, fabric)
    _check_same_data(resume_from, _identity(config, data))
    fabric.launch()
    return _run(fabric, config, plan, data, model, tokenizer, directory, resume_from)


def _run(
    fabric: Fabric,
    config: RunConfig,
    plan: Plan,
    data: PreparedData,
    model: nn.Module,
    tokenizer: Any,
    directory: RunDirectory,
    resume_from: CheckpointInfo | None,
) -> Path:
    torch.manual_seed(config.train.seed)  # for the weights that no file has
    try:
        module = fabric.setup(model)
    except StateMismatchError as error:
        raise ConfigError(f"cannot load {config.model.name_or_path}: {error}") from error
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Optimizer = fabric.setup_optimizers(
        build(config.optimizer, trained, where="optimizer", default_module="torch.optim")
    )
    _announce(fabric, config, data, model, directory, resume_from)
    state = {"model": module, "optimizer": optimizer, "step": 0, **_identity(config, data)}
    # Each rank drops other activations; what must be equal on all ranks is made by now.
    torch.manual_seed(config.train.seed + fabric.global_rank)
    if resume_from is not None:
        load_checkpoint(fabric, resume_from, state)
    try:
        fit(
            fabric,
            module,
            optimizer,
            train_rows=data.train,
            validation_rows=data.validation,
            plan=plan,
            state=state,
        )
    except BaseException:
        fabric.call("on_exception", fabric=fabric)
        raise
    written = directory.model if config.lora is None else directory.adapter
    export(fabric, module, tokenizer, written)
    fabric.barrier()
    fabric.print(f"{'model' if config.lora is None else 'adapter'}: {written}")
    return written


def _callbacks(config: RunConfig, directory: RunDirectory) -> list[object]:
    """List the watchers: those that measure first, the checkpoint after all that write."""
    checkpoint = config.checkpoint
    return [
        ThroughputMonitor(),
        LearningRateMonitor(),
        MetricsCSV(directory.metrics),
        ProgressBar(),
        ModelCheckpoint(
            directory.checkpoints,
            every_n_steps=checkpoint.every_n_steps,
            keep_last=checkpoint.keep_last,
        ),
    ]


def _plan(config: RunConfig, data: PreparedData, fabric: Fabric) -> Plan:
    sharding = Sharding(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        # Fabric knows its rank only after the launch on some launchers; torchrun's is known now.
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    mask_of = {"sdpa": "boolean", "eager": "additive"}
    return Plan(
        num_steps=_num_steps(config, num_steps_per_epoch(len(data.train), sharding)),
        sharding=sharding,
        seed=config.train.seed,
        mask=mask_of[config.model.attn_implementation] if config.data.packing else "none",  # type: ignore[arg-type]
        max_grad_norm=config.train.max_grad_norm,
        lr_scheduler=config.lr_scheduler,
        eval=config.eval,
    )


def _num_steps(config: RunConfig, steps_per_epoch: int) -> int:
    epochs, max_steps = config.train.epochs, config.train.max_steps
    if epochs is None and max_steps is None:
        epochs = 1
    limits = [epochs * steps_per_epoch if epochs is not None else None, max_steps]
    return min(limit for limit in limits if limit is not None)


def _check_optimizer(config: RunConfig) -> None:
    cls = import_class(config.optimizer, where="optimizer", default_module="torch.optim")
    checked_init_args(cls, config.optimizer, where="optimizer", given_by_us=1)


def _identity(config: RunConfig, data: PreparedData) -> dict[str, int]:
    """Collect what gives a step number its meaning; it must not change when a run goes on."""
    return {
        "seed": config.train.seed,
        "global_batch_size": config.train.global_batch_size,
        "num_rows": len(data.train),
    }


def _check_same_data(resume_from: CheckpointInfo | None, identity: dict[str, int]) -> None:
    if resume_from is None:
        return
    for name, value in identity.items():
        if resume_from.values.get(name) != value:
            raise ConfigError(
                f"{resume_from.path} was written with {name} {resume_from.values.get(name)}, this "
                f"run has {value}; its step {resume_from.values['step']} would be another place in "
                "the data: restore the setting, or start a new run in another output_dir."
            )


def _announce(
    fabric: Fabric,
    config: RunConfig,
    data: PreparedData,
    model: nn.Module,
    directory: RunDirectory,
    resume_from: CheckpointInfo | None,
) -> None:
    """Create the output directory and say what is about to run."""
    # Not before every rank has looked whether another run's files lie there.
    fabric.barrier()
    if fabric.is_global_zero:
        directory.create(config)
    sizes = {p: p.unsharded_shape.numel() for p in model.parameters()}
    num_trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    fabric.print(
        f"{data.summary}\nmodel: {num_trained:,} of {sum(sizes.values()):,} parameters are trained"
    )
    if resume_from is not None:
        fabric.print(f"resuming from {resume_from.path}")
