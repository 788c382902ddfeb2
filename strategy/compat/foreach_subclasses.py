"""torch's optimizers step through a Python loop, kernel by kernel, for parameters of a subclass.

On CUDA they prefer one kernel over all parameters (`foreach`), but only where `type(p)` is in a
list; `ShardedParameter` runs the same kernels on the same plain memory. torch's own DTensor enters
the two lists in this way (`torch/distributed/tensor/__init__.py`), which have no public name.

Delete this file when `tests/compat/test_foreach_subclasses.py` says that torch asks otherwise.
"""

from __future__ import annotations

from torch.optim import optimizer
from torch.utils import _foreach_utils

_LISTS = [
    getattr(module, "_foreach_supported_types", None) for module in (optimizer, _foreach_utils)
]


def is_needed() -> bool:
    """Return whether torch reads the lists."""
    return None not in _LISTS


def allow(cls: type) -> None:
    """Let optimizers choose `foreach` for parameters of exactly this type."""
    for types in _LISTS:
        if types is not None and cls not in types:
            types.append(cls)
