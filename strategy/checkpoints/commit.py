"""Files and directories appear under their name complete, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def temporary_name(path: Path) -> Path:
    """A name beside `path` that no reader takes for a checkpoint."""
    return path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")


def save_synced(value: Any, path: Path) -> None:
    """`torch.save` whose bytes are on the disk when it returns."""
    with path.open("wb") as f:
        torch.save(value, f)
        f.flush()
        os.fsync(f.fileno())


def commit(temporary: Path, path: Path) -> None:
    """Gives `temporary` its final name. What was there is set aside first, and then removed.

    A file over a file is one atomic step; where a directory is involved, a crash between the two
    renames leaves the old checkpoint whole under `.old-<name>-<id>`.
    """
    if temporary.is_file() and not path.is_dir():
        os.replace(temporary, path)
    else:
        aside = temporary.with_name(temporary.name.replace(".tmp-", ".old-", 1))
        if os.path.lexists(path):
            os.rename(path, aside)
        os.rename(temporary, path)
        remove(aside)
    sync_directory(path.parent)


def remove(path: Path) -> None:
    """Removes a file or directory that may not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Lets `write` fill a temporary file and commits it; nothing stays of a failed attempt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        write(temporary)
        commit(temporary, path)
    finally:
        remove(temporary)


def sync_directory(directory: Path) -> None:
    """Puts the names in a directory on the disk: a rename is safe only then."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
