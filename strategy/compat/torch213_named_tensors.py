"""torch 2.13 removed named tensors, whose methods Thunder 0.2.6 still looks up at import.

`thunder/torch/default_torch_ops.py` lists them in a module-level dictionary, so that
`import thunder` ends with "type object 'Tensor' has no attribute 'align_as'":
https://github.com/Lightning-AI/lightning-thunder/pull/2829

Delete this file when the oldest Thunder that pyproject.toml allows has that change;
`tests/compat/test_torch213_named_tensors.py` fails when the installed one has it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from packaging.version import Version

METHODS = ("align_as", "align_to", "has_names", "refine_names", "rename")


def is_needed() -> bool:
    """Return whether the installed versions have the defect."""
    thunder = Version(importlib.metadata.version("lightning-thunder"))
    return Version(torch.__version__) >= Version("2.13") and thunder <= Version("0.2.6")


@contextmanager
def stubs() -> Iterator[None]:
    """Give `torch.Tensor` the removed methods while Thunder is imported, and remove them afterwards.

    They must not stay: other libraries ask `hasattr(tensor, "rename")` to see what torch can do.
    """
    names = METHODS if is_needed() else ()
    for name in names:
        setattr(torch.Tensor, name, _stub(name))
    try:
        yield
    finally:
        for name in names:
            delattr(torch.Tensor, name)


def _stub(name: str) -> Callable[..., None]:
    def removed(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"Tensor.{name} was removed in torch 2.13 with named tensors")

    # Thunder registers what it finds under the name and the module that the function gives.
    removed.__name__ = name
    removed.__module__ = "torch"
    removed.__qualname__ = f"Tensor.{name}"
    return removed
