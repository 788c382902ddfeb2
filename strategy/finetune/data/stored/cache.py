"""Keeps what was computed from data files in a directory of the user's cache, each entry whole or not at all."""

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
from thunder_memsave.measure.disk_table import cache_directory
from thunder_memsave.settings.problems import ConfigError

_STREAMING = "data.dataset.init_args.streaming"


def cached(key: str, make: Callable[[Path], None], *, is_whole: Callable[[Path], bool]) -> Path:
    """Return the directory of an entry, which is made unless it is there.

    The processes of a machine ask for the same entry at once: one makes it, and the others wait.

    Args:
        key: Names the entry; equal only for equal contents.
        make: Writes the entry's files into an empty directory.
        is_whole: Whether a directory has all of them.

    Raises:
        ConfigError: the cache cannot be written; or `make` raises it.
    """
    root = cache_directory() / "data"
    entry = root / key
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock") as is_alone:
            if entry.is_dir() and is_whole(entry):
                return entry
            if is_alone:
                _remove_unfinished(root, key)
            _make(entry, make)
    except OSError as error:
        raise ConfigError(
            f"the tokens of the data cannot be written to {root}: {error.strerror or error}. Free some space there, or "
            "name a directory of another disk in the environment variable THUNDER_MEMSAVE_CACHE.",
            key=_STREAMING,
        ) from error
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
def _locked(path: Path) -> Iterator[bool]:
    """Hold a lock between processes, and tell whether the file system has any; renames are safe without one."""
    with path.open("w") as file:
        try:
            _lock(file)
            is_alone = True
        except OSError:
            is_alone = False
        yield is_alone


def _lock(file: IO[str]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if is_first_local():  # which alone reports progress
            told = "waiting for another process, which tokenizes the data"
            print(told, file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)
