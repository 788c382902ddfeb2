"""Gives an optimizer another class in place, also one whose `step` a learning rate schedule has replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from torch.optim import Optimizer


def change_class(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Let an optimizer be of another class from now on.

    A schedule of PyTorch that was made before puts a `step` into the object that calls the class before. It is replaced
    by one that calls the new class, and that tells the schedule of each step as the other did.
    """
    has_schedule = vars(optimizer).pop("step", None) is not None
    optimizer.__class__ = kind
    if has_schedule:
        vars(optimizer)["step"] = _told(optimizer)


def _told(optimizer: Optimizer) -> Callable[..., Any]:
    """Return a step that sets `_opt_called`, at which schedules look."""
    of = weakref.ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        known = cast(Any, of())
        known._opt_called = True
        return type(known).step(known, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step
