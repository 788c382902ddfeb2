"""Records how a run was started: versions, devices, command, commit of the code."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from thunder_memsave.finetune.output.run_directory import write_text
from thunder_memsave.settings.problems import ConfigError

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
    """Append this start of the run to a file that lists all of them.

    Args:
        path: A JSON file with a list, created if it does not exist.
        fabric: Launched.
        step: Step at which the run starts, 0 unless it is resumed.

    Raises:
        ConfigError: the file is not such a list, or cannot be written; it stays as it was.
    """
    try:
        starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        content = [*starts, {**_environment(fabric), "step": step}]
        write_text(path, json.dumps(content, indent=2) + "\n")
    except ValueError as error:
        raise ConfigError(
            f"{path} should list the starts of this run, and is not JSON: {error}; move it away, and start again with "
            "--resume=auto.",
            key="output_dir",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error}; see that the disk has space and may be written to, and start again with "
            "--resume=auto.",
            key="output_dir",
        ) from error


def _environment(fabric: Fabric) -> dict[str, Any]:
    return {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "world_size": fabric.world_size,
        "device": _device_name(fabric.device),
        "python": platform.python_version(),
        # torch's own version names its build for CUDA, which the metadata of PyPI's wheel does not.
        "versions": {
            **{name: _version(name) for name in _PACKAGES},
            "torch": str(torch.__version__),
        },
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
    """Return the commit of the working directory, and whether files in it differ from that commit."""
    commit = _git_output("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "is_dirty": _git_output("status", "--porcelain") != ""}


def _git_output(*arguments: str) -> str | None:
    """Return git's output, or None if there is no git or no repository."""
    try:
        result = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
