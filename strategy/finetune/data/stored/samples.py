"""Stores samples in files, and reads them one by one: 4 bytes and a bit per token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from thunder_memsave.finetune.data.stored.numbers_file import NumbersWriter, StoredNumbers
from thunder_memsave.finetune.data.tokenize import IGNORED, Sample

_TOKENS, _TRAINED, _TABLE = "tokens.bin", "trained.bin", "samples.bin"
_FIELDS = 4
"""Of a sample in the table: its first token, its first byte of marks, its length, and how often an epoch has it."""


class SampleWriter:
    """Appends samples to files in a directory; use it in a `with`."""

    def __init__(self, directory: Path) -> None:
        self._stack = ExitStack()
        open_file = self._stack.enter_context
        self._tokens = open_file(NumbersWriter(directory / _TOKENS, "<i4"))
        self._trained = open_file(NumbersWriter(directory / _TRAINED, "u1"))
        self._table = open_file(NumbersWriter(directory / _TABLE, "<i8"))
        self._content = sha256()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def append(self, sample: Sample, *, times: int) -> None:
        """Append a sample that each epoch has `times` times.

        Positions without a loss are marked by bits: the others predict the token that follows. The last position of a
        piece may predict the first token of the next piece, so that one more token is stored than the sample has.
        """
        is_trained = sample.targets != IGNORED
        row = [self._tokens.count, self._trained.count, len(sample), times]
        tokens = self._tokens.append(np.append(sample.input_ids, sample.targets[-1]))
        marks = self._trained.append(np.packbits(is_trained))
        for part in (self._table.append(row), tokens, marks):
            self._content.update(part)

    def finish(self) -> str:
        """Complete the files, and return a hash of all samples."""
        for file in (self._tokens, self._trained, self._table):
            file.finish()
        return self._content.hexdigest()


class StoredSamples(Sequence[Sample]):
    """The samples of such a directory; each is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        self._tokens = StoredNumbers(directory / _TOKENS, "<i4")
        self._trained = StoredNumbers(directory / _TRAINED, "u1")
        self._table = StoredNumbers(directory / _TABLE, "<i8")

    def __len__(self) -> int:
        return len(self._table) // _FIELDS

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """Read one sample, or several."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        first, first_mark, length, _ = map(int, self._table.read(index * _FIELDS, _FIELDS))
        tokens = self._tokens.read(first, length + 1).astype(np.int32)
        marks = self._trained.read(first_mark, (length + 7) // 8)
        is_trained = np.unpackbits(marks, count=length).astype(bool)
        targets = np.where(is_trained, tokens[1:], np.int32(IGNORED))
        return Sample(input_ids=tokens[:-1], targets=targets)

    def lengths_and_times(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return length and times of some samples, of shape (count, 2)."""
        table = self._table.read(start * _FIELDS, count * _FIELDS)
        return table.reshape(-1, _FIELDS)[:, 2:]
