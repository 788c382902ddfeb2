"""Gives the planner the rates and the memory of the device that is here."""

from __future__ import annotations

import logging
import re

import torch

from thunder_memsave.planner.devices import DEVICES, device
from thunder_memsave.planner.graph import Device

_UNKNOWN = "h100"

_log = logging.getLogger(__name__)


def device_at(place: torch.device) -> Device:
    """Return the rates of a device, by its name: `NVIDIA H200` is `h200`. An unknown one gets those of an H100."""
    if place.type != "cuda":
        return device("cpu")
    name = torch.cuda.get_device_name(place).lower()
    # As a word: a GH200 is no H200.
    known = next((d for key, d in DEVICES.items() if re.search(rf"\b{key}\b", name)), None)
    if known is None:
        _log.warning(
            "the rates of %s are not known, so plans estimate recompute times with those of an %s; the memory budget "
            "holds all the same.",
            name,
            _UNKNOWN,
        )
    return known or device(_UNKNOWN)


def available_bytes(place: torch.device) -> int | None:
    """Return the bytes of the device that this process has or can have: all but other programs' and CUDA's own.

    None for the CPU, whose memory is not a limit that is planned for.
    """
    if place.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(place)
    return free + torch.cuda.memory_reserved(place)


def total_bytes(place: torch.device) -> int | None:
    """Return the device's memory in bytes; None for the CPU, whose memory other programs share."""
    if place.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(place).total_memory)
