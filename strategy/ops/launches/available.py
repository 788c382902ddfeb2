"""Says whether Triton launches kernels on this machine's CUDA device."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_log = logging.getLogger(__name__)


def why_not(launch: Callable[[], object], *, instead: str) -> str | None:
    """Return why a launch on this machine's CUDA device fails, which is logged; None: it does not.

    Args:
        launch: Tries it.
        instead: A sentence's rest for the log: what runs where it fails, and what that costs.
    """
    if (reason := _failure(launch)) is not None:
        _log.warning("%s: %s; install `triton` and a C compiler.", reason, instead)
    return reason


def _failure(launch: Callable[[], object]) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        with _disable_current_modes():
            launch()
            torch.cuda.synchronize()
    except Exception as error:  # such as a missing C compiler, which Triton starts
        return f"Triton does not run ({error})"
    return None


def has_numbers(x: Tensor) -> bool:
    """Return whether there is anything to launch on; the planner runs operations on tensors without numbers."""
    return x.device.type != "meta" and not isinstance(x, FakeTensor)
