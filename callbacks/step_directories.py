"""The checkpoints of a run as directories `step-<n>`: their names, and which of them are kept."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from thunder_memsave.checkpoints.commit import sync_directory
from thunder_memsave.checkpoints.disk_errors import told
from thunder_memsave.checkpoints.manifest import (
    DamagedCheckpointError,
    Manifest,
    UnverifiableCheckpointError,
    read_manifest,
)

T = TypeVar("T")

_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_PREFIX = ".partial-"
_REPLACED_PREFIX = f"{_PARTIAL_PREFIX}old-"
"""Prefix of a whole checkpoint while another one of its step takes its name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The rule for keeping the best checkpoints."""

    metric: str
    """Name of a metric of the evaluation at a checkpoint's own step; one without it is never among the best."""
    num_kept: int
    mode: Literal["min", "max"] = "min"


def list_checkpoints(directory: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def is_checkpoint_name(name: str) -> bool:
    """Tell whether a directory of this name is a complete checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def best_checkpoints(directory: Path, best: Best) -> list[Path]:
    """List the checkpoints with the best values, the best first; of equal ones the earlier."""
    manifests = {path: whole_manifest(path) for path in list_checkpoints(directory)}
    values = {path: m.metrics.get(best.metric) for path, m in manifests.items() if m is not None}
    return the_best(values, best)


def the_best(values: Mapping[T, float | None], best: Best) -> list[T]:
    """List the keys of the best values, the best first; of equal ones the first."""
    sign = 1 if best.mode == "min" else -1
    known = [(sign * v, key) for key, v in values.items() if v is not None and math.isfinite(v)]
    return [key for _, key in sorted(known, key=lambda pair: pair[0])][: best.num_kept]


def recover_replaced(directory: Path) -> None:
    """Restore the name of a checkpoint that was being replaced when a kill came between the two renames.

    Several processes may do so at the same time.
    """
    for replaced in directory.glob(f"{_REPLACED_PREFIX}step-*"):
        final = directory / replaced.name.removeprefix(_REPLACED_PREFIX)
        if is_checkpoint_name(final.name) and not final.exists():
            try:
                os.rename(replaced, final)
            except FileNotFoundError:
                continue  # another process was faster
            sync_directory(directory)


def partial_directory(directory: Path, step: int) -> Path:
    """Return the directory in which a step's checkpoint is written before it is complete."""
    return directory / f"{_PARTIAL_PREFIX}step-{step:08d}"


def remove_partial(directory: Path, *, own: Path | None = None) -> None:
    """Remove what kills and full disks left, but no checkpoint that was once complete.

    What cannot be removed is a warning: it takes space, and does not block other steps.

    Args:
        directory: The directory of the checkpoints.
        own: A partial directory that must go, because it is to be written anew.

    Raises:
        OSError: `own` cannot be removed, or the directory cannot be listed.
    """
    recover_replaced(directory)
    for left_over in sorted(directory.glob(f"{_PARTIAL_PREFIX}*")):
        if left_over == own:
            shutil.rmtree(left_over)
        else:
            _or_warn(lambda: _remove_left_over(left_over), left_over)  # noqa: B023  # called at once


def commit_step(partial: Path) -> Path:
    """Rename a finished directory to its final name; an earlier checkpoint of that name is deleted."""
    final = partial.with_name(partial.name.removeprefix(_PARTIAL_PREFIX))
    replaced = partial.with_name(f"{_REPLACED_PREFIX}{final.name}")
    is_replaced = final.exists()
    if is_replaced:
        os.replace(final, replaced)
    os.replace(partial, final)
    sync_directory(final.parent)
    if is_replaced:
        _or_warn(lambda: _delete(replaced), replaced)
    return final


def prune(
    directory: Path, *, step: int, keep_last: int, best: Best | None, keeps_later: bool
) -> None:
    """Delete old checkpoints after that of `step` was committed; what cannot be deleted is a warning.

    Args:
        directory: The directory of the checkpoints.
        step: Step of the newest checkpoint of this run.
        keep_last: Number of checkpoints to keep, that one included.
        best: Which ones to keep besides.
        keeps_later: Keep checkpoints of later steps. False if the run went back: they belong to the abandoned
            branch, and `auto` must not resume from them.
    """
    found = list_checkpoints(directory)
    until_here = [path for path in found if step_of(path) <= step]
    left = [] if keeps_later else found[len(until_here) :]
    for old in left:
        _or_warn(lambda: _delete(old), old)  # noqa: B023  # called at once
    kept = [] if best is None else best_checkpoints(directory, best)
    for old in until_here[:-keep_last]:
        if old not in kept:
            _or_warn(lambda: _delete(old), old)  # noqa: B023  # called at once


def newest_name(directory: Path) -> str:
    """Return the newest checkpoint's name for a message, also if the disk fails."""
    try:
        found = list_checkpoints(directory)
    except OSError as error:
        return f"unknown ({told(error)})"
    return found[-1].name if found else "none"


def _remove_left_over(path: Path) -> None:
    if path.name.startswith(_REPLACED_PREFIX):
        _delete(path)
    else:
        shutil.rmtree(path)


def _delete(old: Path) -> None:
    # Renamed first: a kill during the deletion would leave half a checkpoint under its name, or under one
    # that is recovered.
    doomed = old.with_name(f"{_PARTIAL_PREFIX}{old.name}")
    os.replace(old, doomed)
    shutil.rmtree(doomed)


def _or_warn(act: Callable[[], None], path: Path) -> None:
    try:
        act()
    except OSError as error:
        _log.warning(
            "%s is no longer needed and could not be deleted (%s), so it takes space until it is; training goes on. "
            "Delete it by hand, or make its directory writable.",
            path,
            told(error),
        )


def whole_manifest(path: Path) -> Manifest | None:
    """Read a checkpoint's manifest; None if it is damaged, which is reported when a run resumes from it."""
    try:
        return read_manifest(path)
    except (OSError, DamagedCheckpointError, UnverifiableCheckpointError):
        return None
