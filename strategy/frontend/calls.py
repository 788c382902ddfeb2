"""One call of a module's method, with its arguments bound as Dynamo's guards read them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch._dynamo.convert_frame import get_traced_fn

from thunder_memsave.errors import CaptureError

Method = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method, as Dynamo sees it."""

    target: Method
    """The module itself for `forward` (its hooks are traced too), else the bound method."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    frame_locals: Mapping[str, Any]

    @classmethod
    def of(cls, target: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Bind the arguments.

        Raises:
            TypeError: The arguments do not fit the method, as when calling it.
            CaptureError: The target is not a Python function.
        """
        try:
            function, instance = get_traced_fn(target)
        except RuntimeError as error:
            raise CaptureError(
                f"{type(target).__name__} cannot be captured: {error}. Its forward must be a function or a method."
            ) from error
        bound = _signature(function).bind(
            *(args if instance is None else (instance, *args)), **kwargs
        )
        bound.apply_defaults()
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return cls(
            target, args, kwargs, {**bound.arguments, **{n: c.cell_contents for n, c in cells}}
        )

    @property
    def name(self) -> str:
        """Return `Class.method`, for messages."""
        function, instance = get_traced_fn(self.target)
        owner = self.target if instance is None else instance
        return f"{type(owner).__name__}.{function.__name__}"


_signatures: WeakKeyDictionary[FunctionType, tuple[Any, inspect.Signature]] = WeakKeyDictionary()


def _signature(function: FunctionType) -> inspect.Signature:
    """Return the function's own signature, made once: that takes a tenth of the time of a small module's call."""
    facts = function.__code__, function.__defaults__, function.__kwdefaults__
    known = _signatures.get(function)
    if known is None or any(a is not b for a, b in zip(known[0], facts, strict=True)):
        known = facts, inspect.signature(function, follow_wrapped=False)
        _signatures[function] = known
    return known[1]
