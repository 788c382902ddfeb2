"""Makes the planner's terms for offload of the settings, the device's rates and the host's memory."""

from __future__ import annotations

from dataclasses import replace

from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import HostMemoryError, PlanError
from thunder_memsave.planner.graph import Device
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.search.mixes import OffloadTerms

_PART = 2
"""Half of the free memory is left to what loads data, to checkpoints, and to other programs."""
_COUNTED = 0.85
"""Part of the bandwidth that plans count on: what runs is fused, and takes less time to hide copies than operations."""


def offload_terms(
    memory: MemoryConfig, device: Device, *, free_bytes: int | None
) -> OffloadTerms | None:
    """Return the terms for activations; None: plans offload none.

    Args:
        memory: Settings.
        device: Its rates.
        free_bytes: Memory of the host that is free for this process; None: not known.

    Raises:
        PlanError: the settings leave it to the host's memory how much of that is taken, and that is not known.
    """
    if not memory.offloads_activations:
        return None
    host_bytes = host_budget(memory, free_bytes=free_bytes)
    rates = CopyRates.of(device)
    rates = replace(rates, bytes_per_s=_COUNTED * rates.bytes_per_s)
    return OffloadTerms(rates=rates, host_bytes=host_bytes)


def host_budget(memory: MemoryConfig, *, free_bytes: int | None) -> int:
    """Return the bytes of the host that offload may take; arguments and errors are those of `offload_terms`."""
    if memory.host_budget != "auto":
        return int(memory.host_budget)
    if free_bytes is None:
        raise PlanError(
            "memory.host_budget is auto, half of the host's free memory, but that is not known here; write bytes, such "
            "as '64GiB'."
        )
    return free_bytes // _PART


def check_states_fit(memory: MemoryConfig, states_bytes: int, *, free_bytes: int | None) -> None:
    """Refuse states of optimizers that take more of the host than they may.

    Raises:
        HostMemoryError: they do.
        PlanError: as by `host_budget`.
    """
    if not memory.offloads_optimizer:
        return
    limit_bytes = host_budget(memory, free_bytes=free_bytes)
    if states_bytes > limit_bytes:
        raise HostMemoryError(
            f"the optimizer's states take {states_bytes:,} bytes of the host for each process, and memory.host_budget "
            f"is {limit_bytes:,}; raise it, use more ranks with sharding, or states in fewer bits (optimizer.states)."
        )


def check_weights_fit(memory: MemoryConfig, nbytes: int, *, free_bytes: int | None) -> None:
    """Refuse weights that take more of the host than they may.

    Raises:
        HostMemoryError: they do.
        PlanError: as by `host_budget`.
    """
    if nbytes and nbytes > (limit_bytes := host_budget(memory, free_bytes=free_bytes)):
        raise HostMemoryError(
            f"the weights that memory.offload_weights keeps on the host take {nbytes:,} bytes there, and "
            f"memory.host_budget is {limit_bytes:,}; raise it, name fewer modules, or make weights smaller "
            "(model.frozen_weights)."
        )


def beside_states(terms: OffloadTerms | None, states_bytes: int) -> OffloadTerms | None:
    """Return the terms for activations beside states of optimizers."""
    if terms is None:
        return None
    return replace(terms, host_bytes=max(terms.host_bytes - states_bytes, 0))
