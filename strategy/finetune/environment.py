"""Writes down what a run was started with: versions, devices, command, state of the code."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

_PACKAGES = (
    "thunder-memsave",
    "torch",
    "lightning",
    "lightning-thunder",
    "transformers",
    "peft",
    "safetensors",
    "tokenizers",
)


def add_start(path: Path, fabric: Fabric, *, step: int) -> None:
    """Append this start of a run to a file that lists all of them.

    Args:
        path: A JSON file with a list; made if it is not there.
        fabric: Launched.
        step: At which the run starts, 0 unless it is resumed.
    """
    starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    partial = path.with_name(f".{path.name}.partial")
    content = [*starts, {**_environment(fabric), "step": step}]
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _environment(fabric: Fabric) -> dict[str, Any]:
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "world_size": fabric.world_size,
        "device": _device_name(fabric.device),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "git": _git(),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """Tell the commit of the working directory, and whether files in it differ from that commit."""
    commit = _git_output("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "is_dirty": _git_output("status", "--porcelain") != ""}


def _git_output(*arguments: str) -> str | None:
    """Return None where there is no git or no repository."""
    try:
        result = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
