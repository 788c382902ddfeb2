"""Chooses the settings of PyTorch's allocator for CUDA, unless the user has chosen some.

Segments that can grow leave fewer free blocks between tensors (docs/memory.md, "What PyTorch reserves"), and are off in
PyTorch. Its allocator reads the settings when it first reserves memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.caching_allocator.environment import VARIABLES

_SETTING = "expandable_segments:True"

_log = logging.getLogger(__name__)


def allocator_environment(memory: MemoryConfig) -> Mapping[str, str]:
    """Return the environment variables with the settings that a run has on CUDA."""
    if not memory.expandable_segments or any(name in os.environ for name in VARIABLES):
        return os.environ
    return {**os.environ, VARIABLES[0]: _SETTING}


def set_up_allocator(memory: MemoryConfig, place: torch.device) -> None:
    """Let the allocator's segments grow, before CUDA starts; nothing on another device or with the user's settings."""
    wanted = allocator_environment(memory)
    if place.type != "cuda" or wanted is os.environ:
        return
    if torch.cuda.is_initialized():
        _log.warning(
            "CUDA has started before the strategy, so segments of memory stay as they are. To let them grow, set "
            "%s=%s before Python starts; or set memory.expandable_segments to false.",
            VARIABLES[0],
            _SETTING,
        )
        return
    os.environ[VARIABLES[0]] = _SETTING  # for processes that this one starts
    torch._C._accelerator_setAllocatorSettings(_SETTING)
    _log.info(
        "PyTorch's allocator has %s; memory.expandable_segments: false leaves it as it is", _SETTING
    )
