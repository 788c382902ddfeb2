"""Writes files and directories so that they appear under their name complete, or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def temporary_name(path: Path) -> Path:
    """Return a name beside `path` that no reader takes for a checkpoint."""
    return path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")


def save_synced(value: Any, path: Path) -> None:
    """Save with `torch.save`, and return when the bytes are on the disk."""
    with path.open("wb") as f:
        torch.save(value, f)
        f.flush()
        os.fsync(f.fileno())


def commit(temporary: Path, path: Path) -> None:
    """Rename `temporary` to its final name; what was there is moved aside first, then removed.

    Replacing a file by a file is one atomic step. If a directory is involved, a crash between the two
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
    """Remove a file or directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file and commit it; a failed attempt leaves nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        write(temporary)
        commit(temporary, path)
    finally:
        remove(temporary)


def sync_directory(directory: Path) -> None:
    """Sync a directory's names to the disk: a rename is durable only then."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
