"""Says whether Triton launches kernels on this machine's CUDA device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def why_not(launch: Callable[[], object]) -> str | None:
    """Return why a launch on this machine's CUDA device fails, with its error in parentheses; None: it does not."""
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
