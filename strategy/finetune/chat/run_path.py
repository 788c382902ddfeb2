"""Checks the path of a run before anything that takes seconds is imported."""

from __future__ import annotations

from pathlib import Path

from thunder_memsave.settings.problems import ConfigError

_MOST_SHOWN = 5


def require_directory(path: Path) -> None:
    """Refuse a path that is no directory.

    Raises:
        ConfigError: it is none; the message names the newest runs where it was meant to be.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}; {_runs_beside(path)}")


def _runs_beside(path: Path) -> str:
    """Name the runs in the directory that was meant, or say what to name."""
    found = sorted((file.parent for file in path.parent.glob("*/config.yaml")), key=_changed)
    if not found:
        return "name the output_dir of a run, such as runs/first, or an adapter/ in it."
    shown = ", ".join(map(str, found[-_MOST_SHOWN:]))
    return f"the newest runs there: {shown}. A run file names its directory under output_dir."


def _changed(path: Path) -> float:
    return path.stat().st_mtime
