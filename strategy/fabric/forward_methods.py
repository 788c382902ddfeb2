"""Tells Fabric's redirected calls of other methods from calls of `forward`.

For a method marked with `mark_forward_method`, and for a LightningModule's step methods, Fabric
replaces the model's `forward` by a function that calls the method, and then calls the forward
module. A graph captured for one method must never run for another, so the patch is recognised and
removed, and the method's name is passed to the compiled module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_FABRIC_WRAPPERS = "lightning.fabric.wrappers"
_PATCH = "wrapped_forward"


def take_redirection(module: nn.Module) -> str:
    """Return the name of the method that the next call of `module` is for, and restore its real `forward`.

    Raises:
        RuntimeError: Fabric's patch differs from the one this was written for.
    """
    patch = vars(module).get("forward")
    if patch is None or not _is_fabric_patch(patch):
        return "forward"
    closed_over = dict(
        zip(patch.__code__.co_freevars, (c.cell_contents for c in patch.__closure__), strict=True)
    )
    if not {"original_forward", "method_name"} <= closed_over.keys():
        raise RuntimeError(
            f"{_FABRIC_WRAPPERS} redirects methods in a way that this version of thunder_memsave "
            f"does not know (it closes over {sorted(closed_over)}); use lightning 2.6."
        )
    _restore(module, closed_over["original_forward"])
    return str(closed_over["method_name"])


def _is_fabric_patch(function: Any) -> bool:
    return (
        getattr(function, "__module__", None) == _FABRIC_WRAPPERS
        and getattr(function, "__name__", None) == _PATCH
        and getattr(function, "__closure__", None) is not None
    )


def _restore(module: nn.Module, original_forward: Callable[..., Any]) -> None:
    # Restore only a forward that the user put on the instance: a leftover bound method would change
    # what the capture's guards see.
    if getattr(original_forward, "__func__", None) is type(module).forward:
        vars(module).pop("forward")
    else:
        vars(module)["forward"] = original_forward
