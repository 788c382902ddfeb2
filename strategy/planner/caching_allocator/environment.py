"""Reads the settings of PyTorch's caching allocator as users write them, in `PYTORCH_CUDA_ALLOC_CONF`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables, the first that is set counts alone (torch 2.11 to 2.14)."""

_MIB = 2**20
_PAIR = re.compile(r"(\w+):(\[[^\]]*\]|[^,]*)(?:,|$)")
_BYTES = {
    "large_segment_size_mb": "large_segment_bytes",
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_rounding_bytes",
}
# They change neither sizes nor the choice of blocks.
_WITHOUT_EFFECT = re.compile("pinned_|release_lock_|graph_capture_|throw_on_")


class NotSimulatedError(ThunderMemsaveError, ValueError):
    """The allocator has a setting that the simulation does not follow."""

    code = None


def settings_in(environment: Mapping[str, str]) -> AllocatorSettings:
    """Return the settings that torch takes from environment variables.

    Raises:
        NotSimulatedError: one of them is not simulated.
    """
    set_variables = [environment[name] for name in VARIABLES if name in environment]
    return settings_of(set_variables[0] if set_variables else "")


def settings_of(text: str) -> AllocatorSettings:
    """Read settings such as `expandable_segments:True,max_split_size_mb:64`.

    Raises:
        NotSimulatedError: one of them is not simulated.
    """
    values: dict[str, Any] = {}
    for key, value in _PAIR.findall("".join(text.split())):
        if key == "expandable_segments" and value in ("True", "False"):
            values[key] = value == "True"
        elif key in _BYTES and value.isdecimal():
            values[_BYTES[key]] = int(value) * _MIB
        elif key == "roundup_power2_divisions" and value.isdecimal():
            values["power2_divisions"] = int(value)
        elif (key, value) != ("backend", "native") and not _WITHOUT_EFFECT.match(key):
            raise NotSimulatedError(
                f"the CUDA allocator's setting {key}:{value} is not simulated, so what it reserves is not known."
            )
    return AllocatorSettings(**values)
