"""Saves the whole state of a run every n steps; a run goes on from there bit-exactly."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.callbacks.all_ranks import DiskFullError, on_all_ranks
from thunder_memsave.callbacks.random_state import random_state
from thunder_memsave.checkpoints.commit import save_synced, sync_directory
from thunder_memsave.checkpoints.manifest import (
    STATE,
    FileRecord,
    Manifest,
    files_in,
    read_manifest,
    record_file,
    share_of_files,
    write_manifest,
)
from thunder_memsave.sharding import whole_shape

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_PREFIX = ".partial-"
_MAX_FULL = 3
"""So many saves in a row may fail on a full disk, the last of which ends the run."""
_GOES_ON = "Training goes on; free some space, for it ends after %d such saves in a row."
_ENDED = (
    "The training has ended and saves no more; free some space, and go on with --resume=auto, which repeats the steps "
    "since the last one."
)
_GIVEN_UP = (
    f"This was the {_MAX_FULL}rd save in a row that failed, so the run ends; free some space, or lower "
    "checkpoint.keep_last, and go on with --resume=auto."
)
_PACKAGES = ("thunder-memsave", "torch", "lightning-thunder", "lightning")


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What can be said of a checkpoint without loading it."""

    path: Path
    world_size: int
    """How many ranks wrote it; each has its own random state, so as many must go on."""

    values: dict[str, Any]
    """The plain entries of the state, such as `step`."""


class ModelCheckpoint:
    """Writes `step-<n>/` directories, each complete or not there at all.

    A directory holds what `fabric.save` writes, every rank's random state, and a manifest with
    the size and SHA-256 of each file. It gets its name by a rename when all of that is on the disk, so
    that a kill at any time leaves the checkpoints before it as they were. All ranks write to the
    same file system. Where the disk is full it warns and training goes on, until that happens three
    times in a row.

    Args:
        directory: Where to.
        every_n_steps: Steps between two checkpoints; None saves at the end only.
        keep_last: How many stay. A run that went back to an earlier checkpoint replaces the later
            ones with its first.
    """

    def __init__(
        self, directory: str | Path, *, every_n_steps: int | None = None, keep_last: int = 2
    ) -> None:
        self.directory = Path(directory)
        self.every_n_steps = every_n_steps
        self.keep_last = keep_last
        self._saved_step: int | None = None
        self._is_resumed = False
        self._num_full = 0

    def on_train_start(self, *, step: int) -> None:
        """Note the step that the run starts from: its checkpoint is there."""
        self._saved_step = step or None
        self._is_resumed = step > 0

    def on_train_batch_end(self, *, fabric: Fabric, step: int, state: Mapping[str, Any]) -> None:
        """Save if it is time."""
        if self.every_n_steps is not None and step % self.every_n_steps == 0:
            self._save_or_warn(fabric, state, step=step, is_last=False)

    def on_train_end(self, *, fabric: Fabric, step: int, state: Mapping[str, Any]) -> None:
        """Save the end, unless its step was saved already."""
        if self._saved_step != step:
            self._save_or_warn(fabric, state, step=step, is_last=True)

    def save(self, fabric: Fabric, state: Mapping[str, Any], *, step: int) -> Path:
        """Write one checkpoint. A collective; every rank returns its path."""
        final = self.directory / f"step-{step:08d}"
        partial = self.directory / f"{_PARTIAL_PREFIX}{final.name}"
        self._on_rank_zero(fabric, lambda: self._make_partial(partial))
        on_all_ranks(fabric, lambda: fabric.save(partial / STATE, dict(state)))
        on_all_ranks(fabric, lambda: _save_random_state(fabric, partial))
        files: dict[str, FileRecord] = {}
        for share in on_all_ranks(fabric, lambda: _record_share(fabric, partial)):
            files.update(share)
        manifest = _manifest(fabric, state, step=step, files=files)
        self._on_rank_zero(fabric, lambda: self._finish(partial, final, manifest))
        self._saved_step = step
        fabric.call("on_save_checkpoint", fabric=fabric, step=step, path=final)
        return final

    def _save_or_warn(
        self, fabric: Fabric, state: Mapping[str, Any], *, step: int, is_last: bool
    ) -> None:
        """Save; a disk that is full for now costs checkpoints, and not the training."""
        try:
            self.save(fabric, state, step=step)
        except DiskFullError as error:
            self._num_full += 1
            self._on_rank_zero(fabric, self._remove_partial)
            # After the last step it is the export that counts.
            if self._num_full >= _MAX_FULL and not is_last:
                raise DiskFullError(self._full(step, error) + _GIVEN_UP) from error
            if fabric.is_global_zero:
                goes_on = _ENDED if is_last else _GOES_ON % _MAX_FULL
                _log.warning("%s%s", self._full(step, error), goes_on)
        else:
            self._num_full = 0

    def _full(self, step: int, error: DiskFullError) -> str:
        found = list_checkpoints(self.directory)
        return (
            f"no checkpoint of step {step} was written, because the disk of {self.directory} is full ({error}); the "
            f"last one is {found[-1].name if found else 'none'}. "
        )

    def _on_rank_zero(self, fabric: Fabric, act: Callable[[], None]) -> None:
        on_all_ranks(fabric, act if fabric.is_global_zero else lambda: None)

    def _make_partial(self, partial: Path) -> None:
        self._remove_partial()
        partial.mkdir(parents=True)

    def _finish(self, partial: Path, final: Path, manifest: Manifest) -> None:
        """Commit what is written, and only then let older checkpoints go."""
        write_manifest(partial, manifest)
        if (partial / STATE).is_dir():
            sync_directory(partial / STATE)
        sync_directory(partial)
        _commit(partial, final)
        self._prune(manifest.step)

    def _remove_partial(self) -> None:
        for left_over in self.directory.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(left_over)

    def _prune(self, step: int) -> None:
        found = list_checkpoints(self.directory)
        until_here = [path for path in found if step_of(path) <= step]
        # Later ones are of the way that a resumed run left, and `auto` must not go on from them.
        left = found[len(until_here) :] if self._is_resumed else []
        for old in [*until_here[: -self.keep_last], *left]:
            # Renamed first: a kill while files go would leave half a checkpoint under its name.
            doomed = old.with_name(f"{_PARTIAL_PREFIX}{old.name}")
            os.replace(old, doomed)
            shutil.rmtree(doomed)


def list_checkpoints(directory: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def is_checkpoint_name(name: str) -> bool:
    """Say whether a directory of this name is a complete checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """Read the step that the name of a checkpoint says."""
    return int(path.name.removeprefix("step-"))


def read_info(path: Path) -> CheckpointInfo:
    """Read what a checkpoint says of itself.

    Raises:
        DamagedCheckpointError: its manifest is not as it was written, or there is none.
    """
    manifest = read_manifest(path)
    return CheckpointInfo(path=path, world_size=manifest.world_size, values=dict(manifest.values))


def random_file(rank: int) -> str:
    """Name a rank's random state within a checkpoint."""
    return f"random-{rank:05d}.pt"


def _save_random_state(fabric: Fabric, directory: Path) -> None:
    save_synced(random_state(fabric.device), directory / random_file(fabric.global_rank))


def _record_share(fabric: Fabric, directory: Path) -> dict[str, FileRecord]:
    names = share_of_files(
        files_in(directory), rank=fabric.global_rank, world_size=fabric.world_size
    )
    return {name: record_file(directory, name) for name in names}


def _manifest(
    fabric: Fabric, state: Mapping[str, Any], *, step: int, files: Mapping[str, FileRecord]
) -> Manifest:
    modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return Manifest(
        step=step,
        world_size=fabric.world_size,
        sharding=_sharding_of(fabric),
        versions={"python": platform.python_version(), **versions},
        values={k: v for k, v in state.items() if isinstance(v, int | float | str)},
        tensors={key: _tensors_of(module) for key, module in modules.items()},
        files=files,
    )


def _sharding_of(fabric: Fabric) -> str:
    data_parallel = getattr(fabric.strategy, "data_parallel", None)
    return "none" if data_parallel is None else str(data_parallel.mode)


def _tensors_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "shape": list(whole_shape(tensor)),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "is_trained": tensor.requires_grad,
        }
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }


def _commit(partial: Path, final: Path) -> None:
    """Give a finished directory its name; one that an earlier attempt left is renamed first."""
    if final.exists():
        old = final.with_name(f"{_PARTIAL_PREFIX}old-{final.name}")
        os.replace(final, old)
        os.replace(partial, final)
        sync_directory(final.parent)
        shutil.rmtree(old)
    else:
        os.replace(partial, final)
        sync_directory(final.parent)
