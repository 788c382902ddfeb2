"""One run from its configuration to the exported model: the steps in order."""

from __future__ import annotations

import dataclasses
import logging
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer

from thunder_memsave.callbacks import CallbackStates, ThroughputMonitor
from thunder_memsave.callbacks.copies import CheckpointCopies
from thunder_memsave.checkpoints import StateMismatchError
from thunder_memsave.checkpoints.addresses import AddressError
from thunder_memsave.distributed.agreement import OtherRankError, broadcast, together
from thunder_memsave.errors import (
    BudgetError,
    CaptureError,
    CompileError,
    PlanError,
    ThunderMemsaveError,
)
from thunder_memsave.finetune.export.export import export, is_adapted
from thunder_memsave.finetune.model.trained_part import trained_part
from thunder_memsave.finetune.output.environment import add_start
from thunder_memsave.finetune.output.fetched import with_local_checkpoint
from thunder_memsave.finetune.output.run_directory import how_to_go_on
from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.deterministic import deterministic_kernels
from thunder_memsave.finetune.process.processes import LocalProcesses, local_processes
from thunder_memsave.finetune.run.answers import generated_of
from thunder_memsave.finetune.run.callbacks import build_callbacks, build_loggers
from thunder_memsave.finetune.run.describe_job import card_facts
from thunder_memsave.finetune.run.early_end import (
    explained,
    interrupted,
    is_saved,
    refused_budget,
    stopped_error,
)
from thunder_memsave.finetune.run.fabric import build_fabric
from thunder_memsave.finetune.run.job import Job, prepare
from thunder_memsave.finetune.run.plan_shown import PlanShown
from thunder_memsave.finetune.run.reference import reference_key, reference_of, with_reference
from thunder_memsave.finetune.run.resume import (
    BaseFiles,
    base_files,
    load,
    roll_back,
    with_newest_checkpoint,
)
from thunder_memsave.finetune.run.weights_on_host import layers_on_host
from thunder_memsave.finetune.run_file.config import GuardsConfig, RunConfig
from thunder_memsave.finetune.training.caller_memory import caller_memory
from thunder_memsave.finetune.training.loop import LoopPlan, fit
from thunder_memsave.finetune.training.loop_state import LoopState
from thunder_memsave.finetune.training.optimizer import (
    make_optimizer,
)
from thunder_memsave.measure.devices import device_at
from thunder_memsave.measure.host_memory import free_host_bytes
from thunder_memsave.measure.step_memory import StepMemoryError
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.strategy import ThunderMemsaveStrategy

_log = logging.getLogger(__name__)

# Errors of a model's first call if it cannot be compiled or planned; the last reports another rank's.
# Exactly these types: a subclass of the last one is about checkpoints.
_BEFORE_ANY_STEP = (
    BudgetError,
    CaptureError,
    CompileError,
    PlanError,
    StepMemoryError,
    OtherRankError,
)


def train(config: RunConfig, *, prints_plan: bool = False) -> Path:
    """Run the whole training and return the directory of the trained model or adapter.

    User errors are found before anything is written, and nearly all of them before the
    processes join.

    Args:
        config: The run.
        prints_plan: Whether to print the whole plan, which is in `plan.txt` anyway.

    Raises:
        ConfigError: the configuration, the data, the model or the checkpoint cannot be used.
        RunStoppedError: a signal, a loss or gradients that the guards refuse, or a process that died.
        AddressError: all is whole on the disk, and not all of it could be copied to `checkpoint.copy_to`.
    """
    config = with_local_checkpoint(config)
    kernels = deterministic_kernels() if config.train.deterministic else nullcontext()
    with kernels, local_processes(config) as processes:
        return _train(config, processes, prints_plan=prints_plan)


def _train(config: RunConfig, processes: LocalProcesses, *, prints_plan: bool) -> Path:
    job = prepare(config)
    base = base_files(job)
    shown = PlanShown(job.directory.plan, prints_all=prints_plan)
    callbacks = [*build_callbacks(config, job.directory), shown]
    loggers = build_loggers(config, job.directory)
    fabric = build_fabric(config, callbacks=callbacks, loggers=loggers)
    state: dict[str, Any] = {"step": _first_step(job)}
    processes.watch(lambda died: explained(died, fabric, job, state))
    try:
        begun = _begin(fabric, job, base, callbacks, state)
        return _run(fabric, begun.job, begun, state, processes)
    except BudgetError as error:
        raise refused_budget(error, fabric, job) from error
    except BaseException as error:
        told = stopped_error(error, fabric, job, state, processes)
        if told is None:
            raise
        raise told from error


def _first_step(job: Job) -> int:
    """Return the step that the run starts from, for messages before its checkpoint is loaded."""
    return 0 if job.resume_from is None else int(job.resume_from.values.get("step", 0))


def _begin(
    fabric: Fabric,
    job: Job,
    base: BaseFiles,
    callbacks: Sequence[object],
    state: dict[str, Any],
) -> _Begun:
    """Join the processes, fill the model, and put what checkpoints hold into `state`."""
    fabric.launch()
    job = with_newest_checkpoint(fabric, job, base)
    state["step"] = _first_step(job)
    if fabric.is_global_zero:  # which alone reports throughput
        _describe_model(callbacks, job, fabric)
    _say(fabric, job.data.summary)
    if job.fp8 is not None:
        _say(fabric, f"fp8: {job.fp8}")
    if job.in_bytes is not None:
        _say(fabric, job.in_bytes)
    key = reference_key(job)
    module, optimizer = _set_up(fabric, job)
    reference = None
    if key is not None:
        _say(fabric, "comparing with the model as it is now: its log-probabilities of the data")
        reference = reference_of(fabric, module, job, key=key, path=job.directory.reference)
        job = with_reference(job, reference)
    loop_state = LoopState()
    state.update(
        model=trained_part(job.model, in_files=base.names),
        optimizer=optimizer,
        callbacks=CallbackStates([*callbacks, loop_state]),
        **job.identity,
        **base.identity,
    )
    if job.resume_from is not None:
        is_verified = job.config.resume == "auto"
        load(fabric, job.resume_from, job.config, state, is_verified=is_verified)
    # After the checkpoint was loaded: one that does not fit this run file must not replace its own.
    before = _create_directory(fabric, job, step=state["step"])
    if reference is not None and fabric.is_global_zero:
        reference.keep(job.directory.reference)
    return _Begun(
        job=job,
        module=module,
        loop_state=loop_state,
        step=state["step"],
        run_file_before=before,
        copies=next((each for each in callbacks if isinstance(each, CheckpointCopies)), None),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A model that is ready to train, and the start's earlier state."""

    job: Job
    """The run; with `resume=auto`, it resumes from a checkpoint whose files were verified."""
    module: nn.Module
    loop_state: LoopState
    step: int
    run_file_before: str | None
    """The earlier run file of a resumed run; None for a new run."""
    copies: CheckpointCopies | None
    """What copies to `checkpoint.copy_to`, if that is set."""


def _describe_model(callbacks: Sequence[object], job: Job, fabric: Fabric) -> None:
    """Give the throughput monitor the FLOPs per token, if it knows the device's peak."""
    for monitor in callbacks:
        if isinstance(monitor, ThroughputMonitor):
            monitor.matmul_format = job.config.model.dtype
            if monitor.flops_per_token is None and monitor.peak_of(fabric.device) is not None:
                monitor.flops_per_token = job.objective.flops_per_token(job.model)


def _set_up(fabric: Fabric, job: Job) -> tuple[nn.Module, Optimizer]:
    if job.config.model.config is None:
        _say(fabric, f"loading {job.config.model.name_or_path}")  # minutes for a large one
    _keep_weights_on_host(fabric, job)
    torch.manual_seed(job.config.train.seed)  # for weights that are in no file
    try:
        module = fabric.setup(job.model)
    except StateMismatchError as error:
        raise ConfigError(
            f"cannot load {job.config.model.name_or_path}: {error}", key="model.name_or_path"
        ) from error
    trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(job.config, trained, device_type=fabric.device.type)
    own = caller_memory(job.objective, job.batch_sizes, device_type=fabric.device.type)
    cast(ThunderMemsaveStrategy, fabric.strategy).count_caller(
        between_bytes=own.between_bytes,
        other_bytes=own.other_bytes,
        loss_allocations=own.loss_allocations,
    )
    # Everything that must be equal on all ranks exists by now; dropout differs from rank to rank.
    torch.manual_seed(job.config.train.seed + fabric.global_rank)
    return module, cast(Optimizer, fabric.setup_optimizers(optimizer))


def _keep_weights_on_host(fabric: Fabric, job: Job) -> None:
    """Leave on the host what devices cannot hold of a model's frozen weights, before they are loaded. A collective."""
    strategy = cast(ThunderMemsaveStrategy, fabric.strategy)
    if fabric.device.type != "cuda":
        return

    def planned() -> tuple[str, ...]:
        if not fabric.is_global_zero:
            return ()
        free_bytes = free_host_bytes()
        of_rank = None if free_bytes is None else free_bytes // strategy.num_processes
        names, line = layers_on_host(
            job.config,
            job.model,
            replace(device_at(fabric.device), host_memory_bytes=of_rank),
            strategy.budget_bytes,
            num_ranks=fabric.world_size,
        )
        if names:
            _say(fabric, line)
        return names

    names = together(planned, strategy.data_parallel, error_elsewhere=OtherRankError)
    names = broadcast(names, strategy.data_parallel)
    if names:
        memory = replace(strategy.config.memory, offload_weights=names)
        strategy.config = replace(strategy.config, memory=memory)


def _create_directory(fabric: Fabric, job: Job, *, step: int) -> str | None:
    """Create the run's directory on rank 0, and return the run file that was there."""
    # Not before every rank has checked for another run's files there.
    fabric.barrier()
    before = job.directory.run_file_text()
    if fabric.is_global_zero:
        job.directory.create(job.config)
        add_start(job.directory.environment, fabric, step=step)
    return before


def _announce(fabric: Fabric, job: Job, *, num_left: int) -> None:
    """Print what is about to run."""
    num_trained, num_all = job.num_trained_parameters, job.num_parameters
    _say(fabric, f"model: {num_trained:,} of {num_all:,} parameters are trained")
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


def _run(
    fabric: Fabric, job: Job, begun: _Begun, state: dict[str, Any], processes: LocalProcesses
) -> Path:
    """Train and export; notify the callbacks if that fails."""
    plan = _plan(job, fabric)
    _announce(fabric, job, num_left=plan.num_steps - state["step"])
    try:
        ending = fit(
            fabric,
            begun.module,
            state["optimizer"],
            train_rows=job.data.train,
            validation_rows=job.data.validation,
            plan=plan,
            state=state,
            loop_state=begun.loop_state,
            roll_back=lambda: roll_back(fabric, job, state),
        )
        if is_saved(job, state):
            signals.all_is_saved()
        if ending.reason is not None:
            _say(fabric, f"stopped after step {state['step']} of {plan.num_steps}: {ending.reason}")
        exported = None
        if ending.signal is None:
            exported = _export(fabric, job, begun.module)
        if begun.copies is not None and fabric.is_global_zero:
            _finish_copies(begun.copies, fabric, job, exported, processes)
        if exported is not None:
            return exported
    except BaseException as error:
        _tell_callbacks_of_the_end(fabric)
        if type(error) in _BEFORE_ANY_STEP and state["step"] == begun.step:
            _leave_nothing(fabric, job, begun)
        raise
    assert ending.signal is not None
    raise interrupted(fabric, job, state, ending.signal)


def _finish_copies(
    copies: CheckpointCopies,
    fabric: Fabric,
    job: Job,
    exported: Path | None,
    processes: LocalProcesses,
) -> None:
    """Wait for the copies; the other processes end meanwhile, as they need not wait for hours."""
    processes.join()
    _say(fabric, f"copying the checkpoint to {copies.address}")
    try:
        copies.finish(exported)
    except (ThunderMemsaveError, OSError) as error:
        how = how_to_go_on(
            job.directory, num_processes=fabric.world_size, started_from=job.resume_from
        )
        raise AddressError(
            f"not everything was copied to {copies.address}: {error}. All of it is whole in {job.directory.root}, and "
            f"a start with --resume=auto tries the copy again: {how}"
        ) from error


def _tell_callbacks_of_the_end(fabric: Fabric) -> None:
    """Call `on_exception`; an error of a callback is logged, as it is not why the run ended."""
    try:
        fabric.call("on_exception", fabric=fabric)
    except Exception as error:
        _log.warning("a callback failed while the run ended: %s: %s", type(error).__name__, error)


def _leave_nothing(fabric: Fabric, job: Job, begun: _Begun) -> None:
    """Restore the directory, so that the next try, with another budget or model, finds it as this one did."""
    if fabric.is_global_zero:
        job.directory.take_back(begun.run_file_before)


def _export(fabric: Fabric, job: Job, module: nn.Module) -> Path:
    is_adapter = is_adapted(job.model)
    directory = job.directory.adapter if is_adapter else job.directory.model
    what = "adapter" if is_adapter else "model"
    _say(fabric, f"writing the {what}")  # minutes for a large one
    export(fabric, module, job.tokenizer, directory, card=card_facts(job))
    fabric.barrier()
    _say(fabric, f"{what}: {directory}")
    _say(fabric, f"try it: {shlex.join(['thunder-memsave', 'chat', str(job.directory.root)])}")
    return directory


def _plan(job: Job, fabric: Fabric) -> LoopPlan:
    config = job.config
    return LoopPlan(
        num_steps=job.num_steps,
        sharding=job.sharding(rank=fabric.global_rank),
        seed=config.train.seed,
        objective=job.objective,
        max_grad_norm=config.train.max_grad_norm,
        lr_scheduler=config.lr_scheduler,
        eval=config.eval,
        guards=_guards(config),
        log_every_n_steps=config.train.log_every_n_steps,
        order=job.data.order,
        max_nonfinite_skips=sys.maxsize if _strategy_skips(config) else None,
        generated=generated_of(job),
    )


def _guards(config: RunConfig) -> GuardsConfig:
    if not _strategy_skips(config):
        return config.guards
    return dataclasses.replace(config.guards, nonfinite="skip")


def _strategy_skips(config: RunConfig) -> bool:
    """Tell whether the strategy's own setting, which scripts use, skips steps without a limit."""
    return config.strategy.nonfinite_gradients == "skip"
