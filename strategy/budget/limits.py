"""Says which bytes of a call a budget limits: those of tensors, or those that PyTorch's allocator reserves for them."""

from __future__ import annotations

import logging
from functools import cache

from thunder_memsave.budget.allocator_settings import allocator_environment
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.caching_allocator.environment import NotSimulatedError, settings_in
from thunder_memsave.planner.graph import Device

_log = logging.getLogger(__name__)


def limits_reserved(memory: MemoryConfig, device: Device) -> bool:
    """Return whether budgets on a device limit what is reserved there.

    `limits: auto` does on CUDA, unless the allocator has a setting that is not simulated: a warning then says so.
    """
    if memory.limits != "auto":
        return memory.limits == "reserved"
    if device.name == "cpu":
        return False
    try:
        settings_in(allocator_environment(memory))
    except NotSimulatedError as error:
        _warn_once(
            f"{error} So memory.budget limits bytes of tensors, and what is lost between them comes on top; leave "
            "that setting out, or room for it."
        )
        return False
    return True


def limited_bytes(call: PlannedCall, memory: MemoryConfig, device: Device) -> int:
    """Return the bytes that the budget limits; a call without backward is no step that could be simulated.

    Raises:
        PlanError: `memory.limits` is `reserved`, and the allocator has a setting that is not simulated.
    """
    peak_bytes = call.profile.peak_bytes
    if not limits_reserved(memory, device) or call.plan is None:
        return peak_bytes
    return max(peak_bytes, call.reserved_bytes(allocator_environment(memory)))


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
