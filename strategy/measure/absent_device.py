"""Where tensors without data are put that stand for those of a GPU, on a machine that has none.

PyTorch without a GPU indexes no FakeTensor that says it is on one, and runs no backward. Shapes, strides and what an
operation allocates are the same for one that says it is on the CPU; whose allocator is asked is the caller's to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


def place_for(device: str) -> str:
    """The device itself, or the CPU where it is a GPU and there is none."""
    is_absent = device.partition(":")[0] == "cuda" and not torch.cuda.is_available()
    return "cpu" if is_absent else device


class WithoutAbsentDevices(TorchFunctionMode):
    """Operations that name a GPU, as those that make tensors do, name the CPU where there is none."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function with devices that are here."""
        args, kwargs = tree_map(_place, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _place(value: Any) -> Any:
    return torch.device(place_for(str(value))) if isinstance(value, torch.device) else value
