"""Reads tensors that files hold in parts, such as the weights of experts, stacked as a model has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_memsave.checkpoints.quantized_files.stored_source import StoredSource, format_in_files
from thunder_memsave.checkpoints.sources import TensorSource, TensorSpec
from thunder_memsave.stored_weights.format import StoredFormat


@dataclass(frozen=True, slots=True)
class Stack:
    """The parts of one tensor: for each index of its first dimension, what follows one another in the second."""

    parts: tuple[tuple[str, ...], ...]
    """Names in the files."""


class StackedSource:
    """A source that has each stack under one name, in place of its parts; any of its rows are read alone."""

    def __init__(self, source: TensorSource, stacks: Mapping[str, Stack]) -> None:
        """`stacks`: by the name that each gets."""
        self._source, self._stacks = source, stacks

    def names(self) -> Iterable[str]:
        """Return the names of stacks, and all names but those of parts."""
        parts = {name for stack in self._stacks.values() for names in stack.parts for name in names}
        return [*(name for name in self._source.names() if name not in parts), *self._stacks]

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and dtype of the whole tensor.

        Raises:
            ValueError: the parts of a stack have other shapes or dtypes than those of its first row.
        """
        if (stack := self._stacks.get(name)) is None:
            return self._source.spec(name)
        of_rows = [[self._source.spec(part) for part in parts] for parts in stack.parts]
        if any(row != of_rows[0] for row in of_rows):
            raise ValueError(f"the parts of {name!r} do not all have the same shapes and dtypes.")
        first = of_rows[0][0]
        width = sum(spec.shape[0] for spec in of_rows[0])
        return TensorSpec(
            shape=torch.Size([len(stack.parts), width, *first.shape[1:]]), dtype=first.dtype
        )

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read some rows of a tensor, or all of it, to the CPU."""
        if (stack := self._stacks.get(name)) is None:
            return self._source.read(name, rows)
        spec = self.spec(name)
        wanted = stack.parts if rows is None else stack.parts[rows]
        whole = torch.empty((len(wanted), *spec.shape[1:]), dtype=spec.dtype)
        for number, parts in enumerate(wanted):
            start = 0
            for part in parts:
                read = self._source.read(part)
                whole[number, start : start + len(read)] = read
                start += len(read)
        return whole

    def format_of(self, name: str) -> StoredFormat | None:
        """Return the format in which the files have a weight; None: they have its values."""
        return None if name in self._stacks else format_in_files(self._source, name)

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Return the bytes of such a weight, which are not quantised again, or some rows of them."""
        assert isinstance(self._source, StoredSource)
        return self._source.stored(name, rows)
