"""Stores measured numbers in the user's cache directory, so that nothing is measured twice."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """Return this user's cache directory: `$THUNDER_MEMSAVE_CACHE`, else that of XDG, `~/.cache/thunder_memsave`."""
    if own := os.environ.get("THUNDER_MEMSAVE_CACHE"):
        return Path(own)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "thunder_memsave"


class DiskTable:
    """Numbers by key, valid in one environment (versions, device, threads), which names the file."""

    def __init__(self, name: str, environment: str, *, directory: Path | None = None) -> None:
        """`directory`: `cache_directory()` unless given. A file that cannot be read counts as empty."""
        digest = hashlib.sha256(environment.encode()).hexdigest()[:16]
        self._path = (directory or cache_directory()) / f"{name}-{digest}.json"
        self._environment = environment
        self._numbers: dict[str, float] = self._read()
        self._is_changed = False

    def get(self, key: str) -> float | None:
        """Return the number stored for this key, by this process or an earlier one; None if there is none."""
        return self._numbers.get(key)

    def keys(self) -> list[str]:
        """Return all keys."""
        return list(self._numbers)

    def put(self, key: str, number: float) -> None:
        """Store a number; `save` writes it."""
        self._numbers[key] = number
        self._is_changed = True

    def save(self) -> None:
        """Write new numbers, merged with those that other processes have written since.

        If the directory cannot be written to, nothing is raised: the next process measures again.
        """
        if not self._is_changed:
            return
        numbers = {**self._read(), **self._numbers}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps({"of": self._environment, "numbers": numbers}))
        except OSError:
            return
        self._is_changed = False

    def _read(self) -> dict[str, float]:
        try:
            return dict(json.loads(self._path.read_text(encoding="utf-8"))["numbers"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically, so that no process reads half of it."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).replace(path)
