"""Finds the tensors among an operation's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)


def first_of(kind: type[TensorT], args: Sequence[Any]) -> TensorT | None:
    """Return the first tensor of this type among arguments, also within lists and mappings."""
    return next((a for a in tensors_in(args) if isinstance(a, kind)), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also within lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
