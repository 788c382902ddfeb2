"""Dynamo before torch 2.13 inlines `ctx.mark_dirty` of a custom `autograd.Function` and then ignores it.

The function's result is recorded as a new tensor: what reads the changed input afterwards gets a gradient without the
function's own derivative, silently, under `torch.compile` too. With this file such a call is not captured.

Delete this file when torch 2.13 is the oldest supported version; `tests/compat/test_ignored_mark_dirty.py` has the
canary.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any


def is_needed() -> bool:
    """Whether this version of Dynamo keeps no record of the marked tensors."""
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable

    known = inspect.signature(AutogradFunctionContextVariable.__init__).parameters
    return "dirty_tensors" not in known


def apply() -> None:
    """Let Dynamo refuse `mark_dirty` where it would ignore it."""
    if not is_needed():
        return
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable

    known = AutogradFunctionContextVariable.var_getattr

    @functools.wraps(known)
    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if name == "mark_dirty":
            unimplemented(
                gb_type="mark_dirty",
                context=str(self),
                explanation="A custom autograd.Function changes its input (mark_dirty), which torch before 2.13 "
                "captures with wrong gradients.",
                hints=["Update torch to 2.13 or newer."],
            )
        return known(self, tx, name)

    patched: Any = AutogradFunctionContextVariable
    patched.var_getattr = var_getattr
