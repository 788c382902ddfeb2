"""Loads checkpoints whose files are all as they were written; a damaged one is renamed, never deleted."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from thunder_memsave.callbacks.all_ranks import on_all_ranks
from thunder_memsave.callbacks.checkpoint import CheckpointInfo, read_info
from thunder_memsave.callbacks.random_state import seed_from, set_random_state
from thunder_memsave.callbacks.step_directories import (
    is_checkpoint_name,
    list_checkpoints,
    recover_replaced,
    step_of,
)
from thunder_memsave.callbacks.step_to_save import random_file
from thunder_memsave.checkpoints.commit import sync_directory
from thunder_memsave.checkpoints.manifest import (
    STATE,
    DamagedCheckpointError,
    read_manifest,
    require_files,
    require_layout,
    share_of_files,
)
from thunder_memsave.checkpoints.safe_reader import require_stored
from thunder_memsave.checkpoints.sources import load_mapped

_DAMAGED_PREFIX = "damaged-"

_log = logging.getLogger(__name__)


def load_checkpoint(
    fabric: Fabric, info: CheckpointInfo, state: dict[str, Any], *, is_verified: bool = False
) -> None:
    """Fill `state` from a checkpoint and restore this rank's random state. A collective.

    If the number of ranks or the kind of device differs, ranks get other random numbers, the same each time, and a
    warning says so.

    Args:
        fabric: Launched.
        info: The result of `read_info` or `newest_valid`.
        state: The state to fill; unchanged if the checkpoint is damaged.
        is_verified: Its files were just verified, and need not be read again for that.

    Raises:
        DamagedCheckpointError: a file is not what was written; on all ranks.
    """
    if not is_verified:
        damage = find_damage(fabric, info.path)
        if damage is not None:
            raise DamagedCheckpointError(
                f"{info.path} is damaged: {damage}. Name another checkpoint, or restore this one from a copy."
            )
        on_all_ranks(fabric, lambda: _require_own_name(info.path))
    fabric.load(info.path / STATE, state)
    on_all_ranks(fabric, lambda: _load_random_state(fabric, info))


def _load_random_state(fabric: Fabric, info: CheckpointInfo) -> None:
    is_same_world = info.world_size == fabric.world_size
    file = info.path / random_file(fabric.global_rank if is_same_world else 0)
    try:
        state = load_mapped(file, weights_only=True)
        if is_same_world and ("cuda" in state) == (fabric.device.type == "cuda"):
            set_random_state(state, fabric.device)
        else:
            seed_from(state, rank=fabric.global_rank, world_size=fabric.world_size)
            _warn_of_other_numbers(fabric, info, "cuda" if "cuda" in state else "cpu")
    except (OSError, MemoryError):
        raise
    # It is not documented what torch raises for bytes that are no such states.
    except Exception as error:
        raise DamagedCheckpointError(
            f"{file} does not hold the states of random generators ({type(error).__name__}: {error}); name another "
            "checkpoint."
        ) from error


def _warn_of_other_numbers(fabric: Fabric, info: CheckpointInfo, device_type: str) -> None:
    if fabric.is_global_zero:
        _log.warning(
            f"{info.path} was written by {_ranks(info.world_size)} on {device_type}, and "
            f"{_ranks(fabric.world_size)} on {fabric.device.type} go on from it: the weights, the optimizer and the "
            "order of the data are as they were, but dropout and the like get other random numbers (the same ones in "
            "each such start)."
        )


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def find_damage(fabric: Fabric, path: Path) -> str | None:
    """Find a damaged file of a checkpoint, and describe the damage. A collective.

    Each rank reads the files that it wrote; all return the same answer, None if there is no damage.
    """
    found = on_all_ranks(fabric, lambda: _damage_of_share(fabric, path))
    return next((damage for damage in found if damage is not None), None)


def newest_valid(fabric: Fabric, directory: Path) -> CheckpointInfo | None:
    """Choose the newest undamaged checkpoint, and rename newer, damaged ones. A collective.

    Returns:
        None if there is no checkpoint, not even a damaged one.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all are damaged.
        ValueError: the chosen one has the name of another step; it stays where it is.
    """
    (names, *_) = on_all_ranks(fabric, lambda: _names(directory) if fabric.is_global_zero else [])
    reasons: list[str] = []
    for name in reversed(names):
        path = directory / name
        damage = find_damage(fabric, path)
        if damage is None:
            on_all_ranks(fabric, lambda: _require_own_name(path))  # noqa: B023  # called at once
            return read_info(path)
        reasons.append(_set_aside(fabric, path, damage))
    on_all_ranks(fabric, lambda: refuse_only_damaged(directory, reasons))
    return None


def _names(directory: Path) -> list[str]:
    """List the checkpoints for all ranks on rank 0: on a shared file system another rank's view may be older."""
    recover_replaced(directory)
    return [path.name for path in list_checkpoints(directory)]


def _require_own_name(path: Path) -> None:
    """Refuse a renamed checkpoint: checkpoints are ordered by name, so it would be taken for another step's."""
    step = read_manifest(path).step
    if is_checkpoint_name(path.name) and step_of(path) != step:
        raise ValueError(
            f"{path} is a checkpoint of step {step}, so it was renamed or copied; name it step-{step:08d}, or move it "
            "elsewhere."
        )


def list_damaged(directory: Path) -> list[Path]:
    """List the damaged checkpoints that were renamed."""
    return sorted(directory.glob(f"{_DAMAGED_PREFIX}step-*"))


def refuse_only_damaged(directory: Path, reasons: Sequence[str] = ()) -> None:
    """Refuse to start from scratch if there are checkpoints and all are damaged.

    Raises:
        DamagedCheckpointError: that is so.
    """
    damaged = list_damaged(directory)
    if damaged and not list_checkpoints(directory):
        told = " ".join(reasons) or f"Set aside before: {', '.join(path.name for path in damaged)}."
        raise DamagedCheckpointError(
            f"every checkpoint in {directory} is damaged, and no run starts over by itself. {told} Restore one from "
            "a copy under its name step-<n>, or start a new run in another output_dir."
        )


def _damage_of_share(fabric: Fabric, path: Path) -> str | None:
    # One rank finds a file's damage; a checkpoint that is missing altogether means that this rank looks elsewhere.
    if not os.path.lexists(path):
        raise FileNotFoundError(
            errno.ENOENT,
            f"rank {fabric.global_rank} on {socket.gethostname()} does not see a checkpoint that rank 0 sees; give all "
            "hosts the same file system",
            str(path),
        )
    try:
        if path.is_symlink():
            raise DamagedCheckpointError("it is a link, and none is followed")
        manifest = read_manifest(path)
        require_layout(path, manifest)
        names = share_of_files(
            manifest.files, rank=fabric.global_rank, world_size=fabric.world_size
        )
        require_files(path, manifest, names)
        for name in names:
            if name.endswith(".pt") or name == STATE:
                require_stored(path / name)
    except DamagedCheckpointError as error:
        return str(error)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"the disk cannot read it ({error})"
    return None


def _set_aside(fabric: Fabric, path: Path, damage: str) -> str:
    """Rename a damaged checkpoint, and log it."""
    (reason, *_) = on_all_ranks(
        fabric, lambda: _renamed(path, damage) if fabric.is_global_zero else ""
    )
    if fabric.is_global_zero:
        _log.warning(reason)
    return reason


def _renamed(path: Path, damage: str) -> str:
    aside = path.with_name(f"{_DAMAGED_PREFIX}{path.name}")
    number = 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{_DAMAGED_PREFIX}{path.name}-{number}")
    os.rename(path, aside)
    sync_directory(path.parent)
    return f"{path} is damaged: {damage}. It is {aside.name} now, and the one before is tried."
