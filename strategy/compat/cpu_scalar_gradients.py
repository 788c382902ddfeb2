"""Thunder 0.2.6 gives a zero-dimensional CPU tensor the gradient of the whole tensor that it is combined with.

`thunder.clang.maybe_broadcast` does not broadcast such a tensor, like a number, so that it may meet a CUDA tensor.
If both are on one device, nothing then sums the gradient over the broadcast dimensions: `y + y.mean()` fails in
backward with a shape error on CPU, or gives a gradient of the wrong shape. On CUDA the result is right.

Delete this file when `tests/compat/test_cpu_scalar_gradients.py` says that Thunder does it itself.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from packaging.version import Version


def is_needed() -> bool:
    """Return whether the installed version has the defect."""
    return Version(importlib.metadata.version("lightning-thunder")) <= Version("0.2.6")


def apply() -> None:
    """Broadcast zero-dimensional tensors explicitly if all tensors are on one device."""
    if not is_needed():
        return
    import thunder.clang
    from thunder.core.proxies import TensorProxy

    upstream = thunder.clang.maybe_broadcast

    def maybe_broadcast(*args: Any, **kwargs: Any) -> Any:
        devices = {a.device for a in args if isinstance(a, TensorProxy)}
        if len(devices) == 1:
            kwargs["treat_cpu_scalar_tensors_as_numbers"] = False
        return upstream(*args, **kwargs)

    thunder.clang.maybe_broadcast = maybe_broadcast
