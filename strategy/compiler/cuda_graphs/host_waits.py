"""Notices operators that make the host wait for the device, or whose results' shapes depend on values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MASKS = (torch.bool, torch.uint8)
_READS = ("_local_scalar_dense", "is_nonzero", "equal")


class HostWaits(TorchDispatchMode):
    """Notes the names of such operators while it is entered, each once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: dict[str, None] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if waits(func, args) or _copies_to_host(args, kwargs, result):
            self.names[str(func.overloadpacket.__name__)] = None
        return result


def waits(func: Any, args: Any) -> bool:
    """Tell whether an operator of aten reads values on the host; one that indexes does so with masks."""
    name = func.overloadpacket.__name__
    if name.startswith("index"):
        indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        return any(isinstance(i, Tensor) and i.dtype in _MASKS for i in indices)
    return name in _READS or torch.Tag.dynamic_output_shape in func.tags


def _copies_to_host(args: Any, kwargs: Any, result: Any) -> bool:
    """Tell whether a tensor of a device went in, and one of the host came out."""
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return any(t.device.type == "cuda" for t in given) and any(t.device.type == "cpu" for t in made)
