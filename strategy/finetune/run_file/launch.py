"""The number of processes of a run: from torchrun if it started them, else from `devices`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder_memsave.finetune.run_file.config import RunConfig


def is_under_torchrun() -> bool:
    """Tell whether torchrun started this process, among others or alone."""
    return "LOCAL_WORLD_SIZE" in os.environ


def num_local_processes(config: RunConfig) -> int:
    """Count the processes of this machine."""
    if is_under_torchrun():
        return int(os.environ["LOCAL_WORLD_SIZE"])
    if config.devices != "auto":
        return config.devices
    import torch  # takes seconds, and only this answer needs it

    return max(torch.cuda.device_count(), 1)


def world_size(config: RunConfig) -> int:
    """Count the processes of the run, over all machines."""
    return int(os.environ["WORLD_SIZE"]) if is_under_torchrun() else num_local_processes(config)


def is_first_local() -> bool:
    """Tell whether this process reports for its machine; Fabric's own launcher sets LOCAL_RANK too."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
