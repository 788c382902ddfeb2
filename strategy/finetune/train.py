"""One run from its configuration to the exported model: the steps in their order."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer

from thunder_memsave.callbacks import (
    LearningRateMonitor,
    MetricsCSV,
    ModelCheckpoint,
    ProgressBar,
    ThroughputMonitor,
)
from thunder_memsave.callbacks.checkpoint import CheckpointInfo, load_checkpoint
from thunder_memsave.checkpoint import CheckpointError, StateMismatchError
from thunder_memsave.finetune.batches import Sharding, num_steps_per_epoch
from thunder_memsave.finetune.class_spec import build, import_class
from thunder_memsave.finetune.config import RunConfig
from thunder_memsave.finetune.export import export
from thunder_memsave.finetune.fabric import build_fabric
from thunder_memsave.finetune.job import Job, identity, prepare
from thunder_memsave.finetune.loop import Plan, fit
from thunder_memsave.finetune.loss import MaskKind
from thunder_memsave.finetune.run_directory import (
    how_to_go_on,
)
from thunder_memsave.finetune.stop import NotFiniteError, RunInterruptedError, was_interrupted
from thunder_memsave.settings import ConfigError

_MASK_OF_ATTENTION: dict[str, MaskKind] = {"sdpa": "boolean", "eager": "additive"}


def train(config: RunConfig) -> Path:
    """Run the whole training and return the directory of the trained model or adapter.

    What a user can get wrong is found before anything is written, and nearly all of it before the
    processes join.

    Raises:
        ConfigError: the configuration, the data, the model or the checkpoint cannot be used.
        RunStoppedError: Ctrl-C, or a loss or gradients that are not finite.
    """
    job = prepare(config)
    fabric = build_fabric(config, callbacks=_callbacks(job))
    fabric.launch()
    module, optimizer = _set_up(fabric, job)
    state: dict[str, Any] = {"model": module, "optimizer": optimizer, "step": 0}
    state.update(identity(job.config, job.data))
    if job.resume_from is not None:
        _load(fabric, job.resume_from, job.config, state)
    plan = _plan(job, fabric)
    # After the checkpoint: one that does not fit this run file must not replace its own.
    _create_directory(fabric, job)
    _announce(fabric, job, num_left=plan.num_steps - state["step"])
    try:
        return _run(fabric, job, plan, state)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or was_interrupted():
            how = how_to_go_on(job.directory, started_from=job.resume_from)
            raise RunInterruptedError(f"interrupted at step {state['step']}: {how}") from error
        if not isinstance(error, NotFiniteError):
            raise
        change = " --optimizer.init_args.lr=LOWER"
        how = how_to_go_on(job.directory, started_from=job.resume_from, change=change)
        raise NotFiniteError(f"{error} After that, {how}") from error


def _callbacks(job: Job) -> list[object]:
    """List the watchers: those that measure first, the checkpoint after all that write."""
    checkpoint = job.config.checkpoint
    return [
        ThroughputMonitor(),
        LearningRateMonitor(),
        MetricsCSV(job.directory.metrics),
        ProgressBar(),
        ModelCheckpoint(
            job.directory.checkpoints,
            every_n_steps=checkpoint.every_n_steps,
            keep_last=checkpoint.keep_last,
        ),
    ]


def _set_up(fabric: Fabric, job: Job) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(job.config.train.seed)  # for weights that are in no file
    try:
        module = fabric.setup(job.model)
    except StateMismatchError as error:
        raise ConfigError(f"cannot load {job.config.model.name_or_path}: {error}") from error
    trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    optimizer = build(
        job.config.optimizer, trained, where="optimizer", default_module="torch.optim"
    )
    # What must be equal on all ranks is made by now; dropout differs from rank to rank.
    torch.manual_seed(job.config.train.seed + fabric.global_rank)
    return module, cast(Optimizer, fabric.setup_optimizers(optimizer))


def _load(
    fabric: Fabric, checkpoint: CheckpointInfo, config: RunConfig, state: dict[str, Any]
) -> None:
    """Load the checkpoint; the optimizer's arguments stay those of this run's file."""
    cls = import_class(config.optimizer, where="optimizer", default_module="torch.optim")
    given = inspect.signature(cls).parameters
    groups = state["optimizer"].param_groups
    arguments = [{key: group[key] for key in group if key in given} for group in groups]
    try:
        load_checkpoint(fabric, checkpoint, state)
    except (ValueError, KeyError, OSError, CheckpointError) as error:
        raise ConfigError(f"cannot go on from {checkpoint.path}: {error}") from error
    for group, values in zip(state["optimizer"].param_groups, arguments, strict=True):
        group.update(values)
        group.pop("initial_lr", None)  # what the schedule scales, of the run that saved


def _create_directory(fabric: Fabric, job: Job) -> None:
    # Not before every rank has looked whether another run's files lie there.
    fabric.barrier()
    if fabric.is_global_zero:
        job.directory.create(job.config)


def _announce(fabric: Fabric, job: Job, *, num_left: int) -> None:
    """Say what is about to run."""
    sizes = {p: getattr(p, "unsharded_shape", p.shape).numel() for p in job.model.parameters()}
    num_trained = sum(size for parameter, size in sizes.items() if parameter.requires_grad)
    _say(fabric, job.data.summary)
    _say(fabric, f"model: {num_trained:,} of {sum(sizes.values()):,} parameters are trained")
    if job.resume_from is not None:
        _say(fabric, f"resuming from {job.resume_from.path}")
    if num_left > 0:
        _say(fabric, "the first step compiles the model, the others are fast")
    else:
        _say(fabric, "all steps are done; what they trained is written again")


def _say(fabric: Fabric, text: str) -> None:
    # `fabric.print` prints once per node.
    if fabric.is_global_zero:
        print(text, flush=True)


def _run(fabric: Fabric, job: Job, plan: Plan, state: dict[str, Any]) -> Path:
    """Train and export; tell the callbacks if that does not come to its end."""
    try:
        fit(
            fabric,
            state["model"],
            state["optimizer"],
            train_rows=job.data.train,
            validation_rows=job.data.validation,
            plan=plan,
            state=state,
        )
        return _export(fabric, job, state["model"])
    except BaseException:
        fabric.call("on_exception", fabric=fabric)
        raise


def _export(fabric: Fabric, job: Job, module: nn.Module) -> Path:
    is_adapter = job.config.lora is not None
    directory = job.directory.adapter if is_adapter else job.directory.model
    export(fabric, module, job.tokenizer, directory)
    fabric.barrier()
    _say(fabric, f"{'adapter' if is_adapter else 'model'}: {directory}")
    return directory


def _plan(job: Job, fabric: Fabric) -> Plan:
    config = job.config
    sharding = Sharding(
        global_batch_size=job.batch_sizes.global_batch_size,
        micro_batch_size=job.batch_sizes.micro_batch_size,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
    )
    mask = _MASK_OF_ATTENTION[config.model.attn_implementation]
    return Plan(
        num_steps=_num_steps(config, num_steps_per_epoch(len(job.data.train), sharding)),
        sharding=sharding,
        seed=config.train.seed,
        mask=mask if config.data.packing else "none",
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
