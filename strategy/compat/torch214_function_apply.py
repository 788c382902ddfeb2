"""torch 2.14 made `torch.autograd.Function.apply` a builtin, whose `__func__` Thunder 0.2.6 reads at import.

`thunder/core/jit_ext.py` registers how its interpreter of Python treats that function, so that `import thunder` ends
with "'builtin_function_or_method' object has no attribute '__func__'". The interpreter does not run here: Dynamo
captures (`docs/decisions/0002-capture-with-dynamo-and-keep-its-guards.md`).

Delete this file when the oldest Thunder that pyproject.toml allows can be imported without it;
`tests/compat/test_torch214_function_apply.py` fails when the installed one can.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.version import Version
from torch.autograd import Function


def is_needed() -> bool:
    """Return whether the installed versions have the defect."""
    thunder = Version(importlib.metadata.version("lightning-thunder"))
    return not hasattr(Function.apply, "__func__") and thunder <= Version("0.2.6")


@contextmanager
def as_method() -> Iterator[None]:
    """Let `Function.apply` be a class method that calls the builtin while Thunder is imported."""
    if not is_needed():
        yield
        return
    builtin = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return builtin.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Function.apply = builtin  # type: ignore[method-assign]
