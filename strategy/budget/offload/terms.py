"""Makes the planner's terms for offload of the settings, the device's rates and the host's memory."""

from __future__ import annotations

from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import PlanError
from thunder_memsave.planner.graph import Device
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.search.mixes import OffloadTerms

_PART = 2
"""Half of the free memory is left to what loads data, to checkpoints, and to other programs."""


def offload_terms(
    memory: MemoryConfig, device: Device, *, free_bytes: int | None
) -> OffloadTerms | None:
    """Return the terms; None: nothing is offloaded.

    Args:
        memory: Settings.
        device: Its rates.
        free_bytes: Memory of the host that is free for this process; None: not known.

    Raises:
        PlanError: the settings leave it to the host's memory how much of that is taken, and that is not known.
    """
    if memory.offload == "none":
        return None
    if memory.host_budget != "auto":
        host_bytes = int(memory.host_budget)
    elif free_bytes is None:
        raise PlanError(
            "memory.host_budget is auto, half of the host's free memory, but that is not known here; write bytes, such "
            "as '64GiB'."
        )
    else:
        host_bytes = free_bytes // _PART
    return OffloadTerms(rates=CopyRates.of(device), host_bytes=host_bytes)
