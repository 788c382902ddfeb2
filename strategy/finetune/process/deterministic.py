"""Makes PyTorch use kernels that give the same bits every time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thunder_memsave.planner.workspaces import VARIABLE


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Allow only deterministic kernels inside.

    cuBLAS reads its variable when CUDA starts, so this must be entered before; a value that the user has set stays
    (docs.nvidia.com/cuda/cublas, "Results reproducibility").
    """
    given = os.environ.get(VARIABLE)
    os.environ.setdefault(VARIABLE, ":4096:8")
    try:
        with deterministic_choice():
            yield
    finally:
        if given is None:
            del os.environ[VARIABLE]


@contextmanager
def deterministic_choice() -> Iterator[None]:
    """Let PyTorch choose only deterministic kernels inside; cuBLAS's stay as they are."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before, warn_only=warned)


@contextmanager
def unfilled_choice() -> Iterator[None]:
    """Choose as `deterministic_choice` does, and leave new memory as it is: to plan, or to time steps."""
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    with deterministic_choice():
        memory.fill_uninitialized_memory = False
        try:
            yield
        finally:
            memory.fill_uninitialized_memory = filled
