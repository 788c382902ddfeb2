"""Names the machine, its device and the versions of what is installed, or says in one line what is missing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

PACKAGES = (
    "thunder-memsave",
    "torch",
    "lightning",
    "lightning-thunder",
    "transformers",
    "peft",
    "triton",
    "transformer-engine",
)
NEEDED = ("thunder_memsave", "torch", "lightning", "thunder", "transformers", "peft")
_SECONDS = 120.0


def asked(device: str) -> dict[str, Any]:
    """Describe the machine; in another process, so that this one holds no memory of the device."""
    if device == "cpu":
        return described(device)
    command = [sys.executable, "-W", "ignore", "-m", "gpu", "machine", "--device", device]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"missing": f"the device did not answer within {_SECONDS:.0f} s"}
    try:
        return dict(json.loads(found.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        last = (found.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"missing": f"the machine could not be described: {last}"}


def described(device: str) -> dict[str, Any]:
    """Return device, versions and host; with the key `missing`, why nothing can run."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        return {"missing": f"these packages are missing: {', '.join(absent)}; {_HOW}"}
    import torch

    found: dict[str, Any] = {
        "host": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }
    if device == "cpu":
        return {"device": "cpu", **found}
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "sees no NVIDIA GPU" if built else "is a build without CUDA"
        return {"missing": f"torch {torch.__version__} {why}; this part runs on a CUDA device"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "num_devices": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "driver": _driver(),
        **found,
    }


_HOW = (
    "`make setup` installs them, or `make gpu-wheels` collects them for a machine without a network"
)


def short_name(machine: Mapping[str, Any]) -> str:
    """Return the device's name for a file: letters, digits and hyphens."""
    name = str(machine["device"]).lower().removeprefix("nvidia ")
    return "".join(c if c.isalnum() else "-" for c in name)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    """Return the commit; where no repository came along, what the variable says."""
    return (
        os.environ.get("GPU_CHECKS_COMMIT")
        or _said("git", "describe", "--always", "--dirty")
        or "unknown"
    )


def _driver() -> str:
    return _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"


def _said(*command: str) -> str:
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (run.stdout.strip().splitlines() or [""])[0]
