"""Finds, verifies and loads the checkpoint that a run resumes from, or goes back to."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric import Fabric

from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.callbacks.verified import load_checkpoint, newest_valid
from thunder_memsave.checkpoints import CheckpointError, StateMismatchError
from thunder_memsave.finetune.output.same_run import check_same_run
from thunder_memsave.finetune.process.stop import BadStepError
from thunder_memsave.finetune.run.job import Job
from thunder_memsave.finetune.run_file.classes.class_kinds import IMPLEMENTATIONS
from thunder_memsave.finetune.run_file.classes.class_spec import import_class
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.training.optimizer import chooses_implementation, place_steps
from thunder_memsave.materialize.pending_weights import fingerprint_of_files, names_in_files
from thunder_memsave.settings.problems import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFiles:
    """The weights that can be read again from the model's own files, and need not be in checkpoints."""

    names: frozenset[str]
    identity: dict[str, str]
    """Fingerprint of these files, for checkpoints."""


def base_files(job: Job) -> BaseFiles:
    """Find the weights in the files of a partly frozen model.

    Raises:
        ConfigError: the checkpoint to resume from was made with other files.
    """
    if all(parameter.requires_grad for parameter in job.model.parameters()):
        return BaseFiles(names=frozenset(), identity={})
    names = names_in_files(job.model)
    identity = {"base_model": fingerprint_of_files(job.model)} if names else {}
    _check_same_base(job, identity)
    return BaseFiles(names=names, identity=identity)


def _check_same_base(job: Job, identity: Mapping[str, str]) -> None:
    checkpoint = job.resume_from
    if checkpoint is not None and checkpoint.values.get("base_model") != identity.get("base_model"):
        raise ConfigError(
            f"{checkpoint.path} was written with other frozen weights than those of "
            f"model.name_or_path {job.config.model.name_or_path}, and does not hold them; restore "
            "the model, or start a new run in another output_dir.",
            key="model.name_or_path",
        )


def with_newest_checkpoint(fabric: Fabric, job: Job, base: BaseFiles) -> Job:
    """Let all ranks resume from rank 0's checkpoint; under `resume=auto`, from the newest undamaged one.

    Raises:
        ConfigError: none is valid, or the one before belongs to another run.
    """
    if job.config.resume is False:
        return job
    # On a shared file system some ranks may not see it yet.
    job = dataclasses.replace(job, resume_from=fabric.broadcast(job.resume_from))
    if job.config.resume != "auto" or job.resume_from is None:
        return job
    try:
        valid = newest_valid(fabric, job.directory.checkpoints)
    except (ValueError, OSError, CheckpointError) as error:
        raise ConfigError(str(error), key="resume") from error
    assert valid is not None  # one was there
    check_same_run(valid, job.identity, job.config)
    job = dataclasses.replace(job, resume_from=valid)
    _check_same_base(job, base.identity)
    return job


def load(
    fabric: Fabric,
    checkpoint: CheckpointInfo,
    config: RunConfig,
    state: dict[str, Any],
    *,
    is_verified: bool,
) -> None:
    """Load the checkpoint; the optimizer's arguments stay those of this run's file."""
    cls = import_class(config.optimizer, where="optimizer", default_module="torch.optim")
    given = {*inspect.signature(cls).parameters, "rounding"}
    if not chooses_implementation(config.optimizer):
        given -= set(IMPLEMENTATIONS)  # as the run began, for the same bits
    arguments = [_arguments(group, given) for group in state["optimizer"].param_groups]
    try:
        load_checkpoint(fabric, checkpoint, state, is_verified=is_verified)
    except StateMismatchError as error:
        raise ConfigError(_does_not_fit(checkpoint, error), key="resume") from error
    except (ValueError, KeyError, OSError, CheckpointError) as error:
        message = f"cannot resume from {checkpoint.path}: {error}"
        raise ConfigError(message, key="resume") from error
    for group, values in zip(state["optimizer"].param_groups, arguments, strict=True):
        group.update(values)
        group.pop("initial_lr", None)  # belongs to the schedule of the run that saved
    place_steps(state["optimizer"])


def _arguments(group: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return a parameter group's initial arguments; its learning rate may be a later step's."""
    values = {key: group[key] for key in group if key in names}
    return {**values, "lr": group.get("initial_lr", group["lr"])}


def _does_not_fit(checkpoint: CheckpointInfo, error: StateMismatchError) -> str:
    return (
        f"{checkpoint.path} holds another model or optimizer than this run file describes "
        f"({'; '.join(error.places)}); restore 'model', 'lora', 'adapter' and 'optimizer' as "
        "in the config.yaml beside its checkpoints, or start a new run in another output_dir."
    )


def roll_back(fabric: Fabric, job: Job, state: dict[str, Any]) -> None:
    """Restore everything from the newest undamaged checkpoint, or from the one that the run began with.

    Raises:
        BadStepError: there is none yet, or none that can be loaded.
    """
    fabric.call("on_rollback_start", fabric=fabric)  # a save may be in progress
    not_taken = f"step {state['step'] + 1} was not taken: its loss or gradients are bad"
    try:
        own = newest_valid(fabric, job.directory.checkpoints)
        checkpoint = own or job.resume_from
        if checkpoint is not None:
            load(fabric, checkpoint, job.config, state, is_verified=own is not None)
    except (ValueError, OSError, CheckpointError) as error:
        raise BadStepError(f"{not_taken}, and the run cannot go back: {error}") from error
    if checkpoint is None:
        raise BadStepError(
            f"{not_taken}, and guards has 'rollback', but there is no checkpoint yet; lower checkpoint.every_n_steps "
            "or the learning rate, or check the data."
        )
