"""Puts fake tensors of a GPU on the CPU, on a machine that has no GPU.

PyTorch without a GPU cannot index a FakeTensor that says it is on one, nor run backward. Shapes, strides and
allocations are the same for a FakeTensor on the CPU; the caller chooses which allocator's rounding to count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


def place_for(device: str) -> str:
    """Return the device itself, or the CPU for a GPU on a machine without one."""
    is_absent = device.partition(":")[0] == "cuda" and not torch.cuda.is_available()
    return "cpu" if is_absent else device


class WithoutAbsentDevices(TorchFunctionMode):
    """Replaces a GPU in operations' arguments, such as factory functions, by the CPU on a machine without one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function with devices that exist here."""
        args, kwargs = tree_map(_place, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _place(value: Any) -> Any:
    return torch.device(place_for(str(value))) if isinstance(value, torch.device) else value
