"""A source whose files hold weights in NF4, as bitsandbytes writes them: each is there dequantised, and as bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from thunder_memsave.checkpoints.sources import TensorSource, TensorSpec
from thunder_memsave.stored_weights.format import StoredFormat
from thunder_memsave.stored_weights.formats import NF4
from thunder_memsave.stored_weights.nf4.bitsandbytes import (
    Nf4State,
    Parts,
    assembled,
    belongs_to,
    checked_state,
    refuse_other_tables,
)
from thunder_memsave.stored_weights.nf4.layout import GROUP, SCALES
from thunder_memsave.stored_weights.nf4.numbers import dequantize


class Nf4Source:
    """Tensors of another source; those in NF4 are read dequantised, in float32, or as our bytes."""

    def __init__(self, source: TensorSource, state_of: dict[str, str]) -> None:
        """Read nothing yet.

        Args:
            source: Has the parts of weights in NF4 under names of their own.
            state_of: The name of each such weight -> that of its JSON.
        """
        self._source, self._state_of = source, state_of
        self._states: dict[str, Nf4State] = {}

    def names(self) -> Iterable[str]:
        """Return all names but those of scales, tables and JSON."""
        return [n for n in self._source.names() if belongs_to(n) not in self._state_of]

    def format_of(self, name: str) -> StoredFormat | None:
        """Return NF4 if the files have this weight so."""
        return NF4 if name in self._state_of else None

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and dtype of the whole tensor, dequantised.

        Raises:
            QuantizedFilesError: Its blocks or tables are others than ours.
        """
        if name not in self._state_of:
            return self._source.spec(name)
        return TensorSpec(shape=self._state(name).shape, dtype=torch.float32)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read some rows, or all; of a weight in NF4 only the groups that have them."""
        if name not in self._state_of:
            return self._source.read(name, rows)
        shape = self._state(name).shape
        first, last, _ = (rows or slice(None)).indices(shape[0])
        width = shape[1:].numel()
        begin, end = first * width, max(first, last) * width
        if begin == end:
            return torch.empty((0, *shape[1:]))
        first_group, last_group = begin // GROUP, -(-end // GROUP)
        num_elements = min(last_group * GROUP, shape.numel()) - first_group * GROUP
        stored = self._groups(name, first_group, last_group, num_elements)
        values = dequantize(stored, (num_elements,), torch.float32)
        return values[begin - first_group * GROUP :][: end - begin].view(-1, *shape[1:])

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Return the bytes of a weight in NF4, without quantising it again: uint8, flat; they have no rows."""
        assert rows is None
        num_elements = self._state(name).shape.numel()
        return self._groups(name, 0, -(-num_elements // GROUP), num_elements)

    def _groups(self, name: str, first: int, last: int, num_elements: int) -> Tensor:
        of_codes = self._source.spec(name)
        size = (
            of_codes.dtype.itemsize * of_codes.shape[1:].numel()
        )  # of a row of bnb_4bit_quant_storage
        codes = slice(first * GROUP // 2 // size, -(-last * GROUP // 2 // size))
        skipped = first * GROUP // 2 - codes.start * size
        numbers = self._source.read(name, codes).contiguous().view(torch.uint8).flatten()
        parts = Parts(
            numbers=numbers[skipped:][: -(-num_elements // 2)],
            scales=self._source.read(f"{name}.absmax", slice(first * SCALES, last * SCALES)),
            scale=self._source.read(f"{name}.nested_absmax", slice(first, last)),
        )
        return assembled(parts, num_elements, self._state(name).offset)

    def _state(self, name: str) -> Nf4State:
        if name not in self._states:
            read = self._source.read
            self._states[name] = checked_state(name, read(self._state_of[name]))
            refuse_other_tables(name, read(f"{name}.quant_map"), read(f"{name}.nested_quant_map"))
        return self._states[name]
