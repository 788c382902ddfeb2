"""Keeps what was computed or copied in a directory of the user's cache, each entry whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from thunder_memsave.finetune.run_file.launch import is_first_local


def cached(
    root: Path,
    key: str,
    make: Callable[[Path], None],
    *,
    is_whole: Callable[[Path], bool],
    waits_for: str,
) -> Path:
    """Return the directory of an entry, which is made unless it is there.

    The processes of a machine ask for the same entry at once: one makes it, and the others wait.

    Args:
        root: Directory of such entries, which is made unless it is there.
        key: Names the entry; equal only for equal contents.
        make: Writes the entry's files into an empty directory.
        is_whole: Whether a directory has all of them.
        waits_for: What the others wait for, to be told.

    Raises:
        OSError: the cache cannot be written; `make` raises its own errors.
    """
    entry = root / key
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{key}.lock", waits_for) as is_alone:
        if entry.is_dir() and is_whole(entry):
            return entry
        if is_alone:
            _remove_unfinished(root, key)
        _make(entry, make)
    return entry


def _make(entry: Path, make: Callable[[Path], None]) -> None:
    partial = entry.with_name(f"{entry.name}.partial-{socket.gethostname()}-{os.getpid()}")
    partial.mkdir()
    try:
        make(partial)
        shutil.rmtree(entry, ignore_errors=True)  # one that lacks a file
        try:
            partial.rename(entry)
        except OSError:
            if not entry.is_dir():  # another machine of a shared disk was first
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_unfinished(root: Path, key: str) -> None:
    """Remove what killed processes have left; this one holds the lock."""
    for path in root.glob(f"{key}.partial-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, waits_for: str) -> Iterator[bool]:
    """Hold a lock between processes, and tell whether the file system has any; renames are safe without one."""
    with path.open("w") as file:
        try:
            _lock(file, waits_for)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone


def _lock(file: IO[str], waits_for: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if is_first_local():  # which alone reports progress
            print(f"waiting for {waits_for}", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
