"""Saves the whole state of a run every n steps; a resumed run continues bit-exactly."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning.fabric import Fabric

from thunder_memsave.callbacks.all_ranks import DiskError, DiskFullError
from thunder_memsave.callbacks.background_saves import BackgroundSaves, require_snapshots
from thunder_memsave.callbacks.random_state import random_state
from thunder_memsave.callbacks.step_directories import (
    Best,
    is_checkpoint_name,
    list_checkpoints,
    newest_name,
    prune,
    remove_partial,
    step_of,
)
from thunder_memsave.callbacks.step_to_save import StepToSave, describe, random_file
from thunder_memsave.checkpoints.manifest import read_manifest

__all__ = [
    "CheckpointInfo",
    "ModelCheckpoint",
    "is_checkpoint_name",
    "list_checkpoints",
    "random_file",
    "read_info",
    "step_of",
]

_MAX_FAILED = 3
"""Consecutive saves that may fail because of the disk; the last of them ends the run."""
_GOES_ON = f"Training goes on; %s, for it ends after {_MAX_FAILED} such saves in a row."
_ENDED = (
    "The training has ended and saves no more; %s, and go on with --resume=auto, which repeats the steps "
    "since the last one."
)
_END_FOLLOWS = "The end of the training is saved next; %s."
_GIVEN_UP = (
    f"This was the {_MAX_FAILED}rd save in a row that failed, so the run ends; %s, and go on with "
    "--resume=auto."
)
_When = Literal["in training", "before the end", "at the end"]
_THEN = {"in training": _GOES_ON, "before the end": _END_FOLLOWS, "at the end": _ENDED}
_LONGEST_WAIT_SECONDS = 30.0
"""Longest wait for the save in progress when the run ends with an error, which must not hang."""

Writes = Callable[[Path], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """Facts about a checkpoint that are known without loading it."""

    path: Path
    world_size: int
    """Number of ranks that wrote it; each has its own random state."""

    values: dict[str, Any]
    """The plain entries of the state, such as `step`."""

    config: Mapping[str, Any] | None = None
    """The run file that it was written under, if there was one."""

    tensors: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Key of the module -> name of a weight -> its whole `shape`, `dtype`, and `is_trained`."""


class ModelCheckpoint:
    """Writes `step-<n>/` directories, each complete or absent.

    A directory holds what `fabric.save` writes, every rank's random state, and a manifest with
    the size and SHA-256 of each file. It is renamed to its final name when all of that is on the disk, so
    a kill at any time leaves the earlier checkpoints as they were. All ranks write to the same file system.
    If the disk is full, or refuses to write for another reason, it warns and training goes on,
    until that happens three times in a row.

    Args:
        directory: The directory of the checkpoints.
        every_n_steps: Steps between two checkpoints; None saves at the end only.
        keep_last: Number of newest checkpoints to keep. A run that went back to an earlier checkpoint replaces
            the later ones with its first.
        keep_best: Number of checkpoints to keep besides, those with the best values of `best_of`.
        best_of: A metric of evaluations; a checkpoint has the value of the evaluation at its own step.
        best_mode: Whether smaller or larger values are better.
        asynchronous: Copy the state to host memory, and write it while training goes on. At most one save is in
            progress, and the next waits for it; its error is raised at the next save, or at the end, which waits too.
            If host memory does not suffice for the copies, training waits for the save instead. It needs
            `ThunderMemsaveStrategy` and sharded checkpoints.
        config: The whole run file, for the manifest.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every_n_steps: int | None = None,
        keep_last: int = 2,
        keep_best: int = 0,
        best_of: str = "val_loss",
        best_mode: Literal["min", "max"] = "min",
        asynchronous: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self.best = Best(metric=best_of, num_kept=keep_best, mode=best_mode) if keep_best else None
        self.asynchronous = asynchronous
        self.config = None if config is None else json.loads(json.dumps(config, default=str))
        self.after_commit: Callable[[], None] = lambda: None
        """Called on rank 0 as soon as a checkpoint is whole, in the thread that writes it; it must not wait."""
        self._saved_step: int | None = None
        self._is_resumed = False
        self._is_rolled_back = False
        self._num_failed = 0
        self._evaluated: tuple[int, dict[str, float]] = (0, {})
        self._background = BackgroundSaves()

    def on_train_start(self, *, fabric: Fabric, step: int) -> None:
        """Note the step that the run starts from, whose checkpoint exists.

        Raises:
            ConfigError: `asynchronous` is set, and the strategy cannot save that way.
        """
        if self.asynchronous:
            require_snapshots(fabric)
        # After a rollback the state contains the skipped data, and the step's checkpoint does not.
        self._saved_step = None if self._is_rolled_back else step or None
        self._is_resumed = step > 0

    def on_validation_end(self, *, step: int, metrics: Mapping[str, Any]) -> None:
        """Note the metrics, for a checkpoint of this step.

        Raises:
            ValueError: `best_of` is not among them.
        """
        if self.best is not None and self.best.metric not in metrics:
            raise ValueError(
                f"checkpoints are kept by {self.best.metric!r}, but an evaluation gives {sorted(metrics)}; set "
                "checkpoint.best_of to one of these."
            )
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
        self._evaluated = (step, {k: v for k, v in numbers.items() if math.isfinite(v)})

    def saves_after(self, step: int) -> bool:
        """Tell whether the end of this step is due to be saved."""
        return self.every_n_steps is not None and step % self.every_n_steps == 0

    def on_train_batch_end(self, *, fabric: Fabric, step: int, state: Mapping[str, Any]) -> None:
        """Save if this step is due."""
        if not self.saves_after(step):
            return
        self._wait_for_background(fabric, when="in training")
        with self._warning_of_disks(fabric, step, when="in training"):
            self._begin(fabric, state, step=step)

    def on_train_end(self, *, fabric: Fabric, step: int, state: Mapping[str, Any]) -> None:
        """Wait for the save in progress, and save the last step, unless it was saved already."""
        self._wait_for_background(fabric, when="before the end")
        if self._saved_step != step:
            with self._warning_of_disks(fabric, step, when="at the end"):
                self.save(fabric, state, step=step)

    def on_rollback_start(self, *, fabric: Fabric) -> None:
        """Wait for the save in progress: the rollback may load it, and nothing is written meanwhile."""
        self._wait_for_background(fabric, when="in training")
        self._is_rolled_back = True

    def on_exception(self) -> None:
        """Let the save in progress finish; its error is logged, so that it does not hide why the run ended."""
        step = self._background.step
        try:
            self._background.settle(_LONGEST_WAIT_SECONDS)
        except Exception as error:
            _log.warning("the checkpoint of step %s was not completed: %s", step, error)

    def save(self, fabric: Fabric, state: Mapping[str, Any], *, step: int) -> Path:
        """Write one checkpoint and wait for it; every rank returns its path. A collective."""
        self._wait_for_background(fabric, when="in training")
        writes: Writes = lambda path: fabric.save(path, dict(state))  # noqa: E731
        path = self._step(fabric, state, step=step, write_state=writes).commit(fabric)
        self._note_saved(fabric, step, path)
        return path

    def _begin(self, fabric: Fabric, state: Mapping[str, Any], *, step: int) -> None:
        """Save, in the background if that is set and possible."""
        if not self.asynchronous or not self._background.has_room(fabric, state):
            self.save(fabric, state, step=step)
            return
        writes = self._background.copy(fabric, state)
        self._background.begin(fabric, self._step(fabric, state, step=step, write_state=writes))

    def _step(
        self, fabric: Fabric, state: Mapping[str, Any], *, step: int, write_state: Writes
    ) -> StepToSave:
        at, metrics = self._evaluated
        return StepToSave(
            directory=self.directory,
            manifest=describe(
                fabric,
                state,
                step=step,
                metrics=metrics if at == step else {},
                config=self.config,
            ),
            write_state=write_state,
            random_state=random_state(fabric.device),
            after_commit=lambda: self._committed(step),
        )

    def _committed(self, step: int) -> None:
        keeps_later = not self._is_resumed
        last, best = self.keep_last, self.best
        prune(self.directory, step=step, keep_last=last, best=best, keeps_later=keeps_later)
        self.after_commit()

    def _wait_for_background(self, fabric: Fabric, *, when: _When) -> None:
        """Wait for the save in progress, if there is one, and note how it ended. A collective."""
        step = self._background.step
        if step is not None:
            with self._warning_of_disks(fabric, step, when=when):
                path = self._background.settle()
                assert path is not None  # a save was under way
                self._note_saved(fabric, step, path)

    def _note_saved(self, fabric: Fabric, step: int, path: Path) -> None:
        self._saved_step = step
        self._num_failed = 0
        fabric.call("on_save_checkpoint", fabric=fabric, step=step, path=path)

    @contextmanager
    def _warning_of_disks(self, fabric: Fabric, step: int, *, when: _When) -> Iterator[None]:
        """Warn of a disk error instead of ending the run; after too many in a row, raise it."""
        try:
            yield
        except DiskError as error:
            self._num_failed += 1
            if fabric.is_global_zero:
                self._clear()
            reason, advice = _reason_and_advice(self.directory, error)
            # On rank 0 alone: an error of its disk here must not hide the error of the save.
            found = newest_name(self.directory) if fabric.is_global_zero else "?"
            message = (
                f"no checkpoint of step {step} was written, {reason}; the last one is {found}. "
            )
            # After the last step the export matters more.
            if self._num_failed >= _MAX_FAILED and when == "in training":
                raise type(error)(message + _GIVEN_UP % advice) from error
            if fabric.is_global_zero:
                _log.warning("%s", message + _THEN[when] % advice)

    def _clear(self) -> None:
        """Free the space of a failed save as far as possible; the next save tries again and reports errors."""
        with suppress(OSError):
            remove_partial(self.directory)


def read_info(path: Path) -> CheckpointInfo:
    """Read a checkpoint's manifest.

    Raises:
        DamagedCheckpointError: the manifest changed, or is missing.
    """
    manifest = read_manifest(path)
    return CheckpointInfo(
        path=path,
        world_size=manifest.world_size,
        values=dict(manifest.values),
        config=manifest.config,
        tensors=manifest.tensors,
    )


def _reason_and_advice(directory: Path, error: DiskError) -> tuple[str, str]:
    if isinstance(error, DiskFullError):
        reason = f"because the disk of {directory} is full ({error})"
        return reason, "free some space, or lower checkpoint.keep_last"
    reason = f"because a file cannot be written or read ({error})"
    return reason, "see that the disk works and may be written to"
