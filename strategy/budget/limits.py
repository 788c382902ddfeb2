"""Says which bytes of a call a budget limits: those of tensors, or those that PyTorch's allocator reserves for them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache

import torch

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


class Limit:
    """A budget, and what it limits."""

    def __init__(self, memory: MemoryConfig, device: Device, budget_bytes: int | None) -> None:
        """Store what it depends on; `budget_bytes` None: there is no limit."""
        self._memory, self._device, self._budget_bytes = memory, device, budget_bytes

    @property
    def is_reserved(self) -> bool:
        """Whether it limits what is reserved."""
        return limits_reserved(self._memory, self._device)

    def bytes_of(self, call: PlannedCall) -> int:
        """Return the bytes of a call that the budget limits; one without backward is no step that could be simulated.

        Of a call that may empty the cache, they are the smallest limit under which the allocator then finds memory.

        Raises:
            PlanError: `memory.limits` is `reserved`, and the allocator has a setting that is not simulated.
        """
        peak_bytes = call.profile.peak_bytes
        if not self.is_reserved or call.plan is None:
            return peak_bytes
        environment: Mapping[str, str] = allocator_environment(self._memory)
        reserved = max(peak_bytes, call.reserved_bytes(environment))
        if not call.empties_cache or self._budget_bytes is None:
            return reserved
        return call.least_bytes(environment, wanted_bytes=self._budget_bytes, enough_bytes=reserved)

    def enforce(self, call: PlannedCall) -> None:
        """Let the allocator of this process reserve no more than the budget, where the plan counts on that."""
        if not call.empties_cache or self._budget_bytes is None:
            return
        _log.warning(
            "the plan stays within memory.budget only if PyTorch's allocator gives cached memory back when it is "
            "reached, which waits for the device; a larger budget, or a smaller micro-batch, makes steps faster."
        )
        if torch.cuda.is_initialized():
            total_bytes = torch.cuda.get_device_properties().total_memory
            torch.cuda.set_per_process_memory_fraction(self._budget_bytes / total_bytes)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)
