"""Turns an error that ends a run early into one message: what happened, at which step, and how to resume."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from lightning.fabric import Fabric

from thunder_memsave.callbacks.checkpoint import list_checkpoints, step_of
from thunder_memsave.checkpoints.addresses import AddressError
from thunder_memsave.compat.foreign_messages import first_line, says_out_of_memory, says_timeout
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.distributed.lost_ranks import CollectiveError
from thunder_memsave.errors import BudgetError
from thunder_memsave.finetune.output.run_directory import how_to_go_on
from thunder_memsave.finetune.plan.cheapest_change import (
    changes_that_should_fit,
    with_states_on_host,
)
from thunder_memsave.finetune.plan.other_formats import Known
from thunder_memsave.finetune.process import signals
from thunder_memsave.finetune.process.processes import LocalProcesses
from thunder_memsave.finetune.process.stop import (
    LESS_MEMORY,
    LESS_MEMORY_OF_A_NEW_RUN,
    BadStepError,
    DeviceMemoryError,
    ProcessDiedError,
    RankLostError,
    RunInterruptedError,
    RunStoppedError,
)
from thunder_memsave.finetune.run.job import Job
from thunder_memsave.finetune.run.out_of_memory import changes, what_happened, write_snapshot
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.strategy import ThunderMemsaveStrategy


def stopped_error(
    error: BaseException, fabric: Fabric, job: Job, state: Any, processes: LocalProcesses
) -> RunStoppedError | None:
    """Turn an expected error into one message for the user; None for other errors."""
    if isinstance(error, RunInterruptedError | AddressError):
        return None
    # A deferred signal raised nothing, so the error has another cause.
    if isinstance(error, KeyboardInterrupt) or signals.raised():
        return interrupted(fabric, job, state, signals.received() or signal.SIGINT)
    if isinstance(error, BadStepError):
        how = _how_to_go_on(fabric, job, change=" --optimizer.init_args.lr=LOWER")
        return type(error)(error.message, advice=f"After that, {how}")
    if says_out_of_memory(error) is not None:
        return DeviceMemoryError(_out_of_memory(error, fabric, job, state))
    # Collectives raise it when another process is gone; an `OtherRankError` tells that process's reason.
    if isinstance(error, RuntimeError) and not isinstance(error, OtherRankError):
        died = processes.died(wait_seconds=0 if _is_timeout(error) else 3)
        if died is not None:
            message = explained(died, fabric, job, state)
            return ProcessDiedError(message, code=processes.exit_code)
    if isinstance(error, dist.DistStoreError):
        return RankLostError(
            f"not all processes joined within strategy.timeout: {first_line(error)} Look at the "
            "output of the others; then start again."
        )
    if isinstance(error, CollectiveError):
        return RankLostError(_lost_rank(error, fabric, job, state))
    return None


def refused_budget(error: BudgetError, fabric: Fabric, job: Job) -> BudgetError:
    """Add to the error the cheapest change of the run that should fit; the same error if none is known."""
    if error.budget_bytes is None or error.smallest_bytes is None:
        return error
    refused = Known(
        num_ranks=fabric.world_size,
        num_rows=job.batch_sizes.micro_batch_size,
        device_type=fabric.device.type,
        budget_bytes=error.budget_bytes,
        peak_bytes=error.smallest_bytes,
    )
    try:
        config = with_states_on_host(job.config) if refused.device_type == "cuda" else job.config
        change = next(changes_that_should_fit(config, refused), None)
    # Nothing here describes the model, or the optimizer's states cannot be on the host.
    except ConfigError:
        return error
    if change is None:
        return error
    return BudgetError(
        f"{error} The cheapest change that should fit, by estimate: {change.shown}, about "
        f"{in_units(change.estimated_bytes)}; `thunder-memsave plan` shows it before the run.",
        budget_bytes=error.budget_bytes,
        smallest_bytes=error.smallest_bytes,
        bound_bytes=error.bound_bytes,
        smallest_plan=error.smallest_plan,
    )


def interrupted(
    fabric: Fabric, job: Job, state: Mapping[str, Any], number: signal.Signals
) -> RunInterruptedError:
    """Name the step that the run is at; the exit code says whether all of it is saved."""
    what = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    code = 128 + number
    if not job.directory.has_begun():
        message = f"{what} before training began; start it again."
    else:
        if number != signal.SIGINT and is_saved(job, state):
            code = signals.EXIT_SAVED
        message = f"{what} at step {state['step']}: {_how_to_go_on(fabric, job)}"
    return RunInterruptedError(message, code=code, is_own=signals.received() is not None)


def is_saved(job: Job, state: Mapping[str, Any]) -> bool:
    """Tell whether the newest checkpoint is of the run's current step; False if the disk fails."""
    own = _own_checkpoints(job) or []
    return bool(own) and step_of(own[-1]) == state["step"]


def explained(died: str, fabric: Fabric, job: Job, state: Mapping[str, Any]) -> str:
    """Explain the end of another process, which ends this one too.

    Args:
        died: Which one, and how.
        fabric: Fabric, launched or not.
        job: The run.
        state: The state that checkpoints hold.
    """
    if not job.directory.has_begun():
        return f"{died} before training began, so the run ends too; start it again."
    return f"{died} at step {state['step']}, so the run ends too; {_how_to_go_on(fabric, job)}"


def _is_timeout(error: RuntimeError) -> bool:
    """Tell a timeout from the end of a process, which is noticed at once."""
    return error.is_timeout if isinstance(error, CollectiveError) else says_timeout(error)


def _lost_rank(error: CollectiveError, fabric: Fabric, job: Job, state: Mapping[str, Any]) -> str:
    if not job.directory.has_begun():
        return f"{error} That was before training began; start it again."
    return f"{error} That was at step {state['step']}; {_how_to_go_on(fabric, job)}"


def _out_of_memory(error: BaseException, fabric: Fabric, job: Job, state: Mapping[str, Any]) -> str:
    strategy = cast(ThunderMemsaveStrategy, fabric.strategy)
    found = changes(error, strategy, sizes=job.batch_sizes, train=job.config.train)
    snapshot = write_snapshot(job.directory.root, rank=fabric.global_rank)
    advice = f"make one change: {' or '.join(found)}" if found else _less_memory(job)
    where = f" What was held is in {snapshot}." if snapshot else ""
    if not job.directory.has_begun():
        return f"{what_happened(error, strategy)}. Start again, and {advice}.{where}"
    how = _how_to_go_on(fabric, job, change=f" {found[0]}" if found else "")
    return f"at step {state['step']}, {what_happened(error, strategy)}. To go on, {advice}.{where} Now {how}"


def _less_memory(job: Job) -> str:
    """Suggest only changes that a resumed run accepts, or else a new run."""
    if job.resume_from is not None or _own_checkpoints(job) != []:
        return f"{LESS_MEMORY}, or start a new run in another output_dir with {LESS_MEMORY_OF_A_NEW_RUN}"
    return f"{LESS_MEMORY}, {LESS_MEMORY_OF_A_NEW_RUN}"


def _own_checkpoints(job: Job) -> list[Path] | None:
    """List the run's checkpoints; None if the disk fails, which must not hide why the run ended."""
    try:
        return list_checkpoints(job.directory.checkpoints)
    except OSError:
        return None


def _how_to_go_on(fabric: Fabric, job: Job, *, change: str = "") -> str:
    return how_to_go_on(
        job.directory,
        num_processes=fabric.world_size,
        started_from=job.resume_from,
        change=change,
    )
