"""Lays stored samples into rows, a block of samples at a time, and stores which row has which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import overload

import numpy as np

from thunder_memsave.finetune.data.packing import best_fits
from thunder_memsave.finetune.data.stored.numbers_file import NumbersWriter, StoredNumbers
from thunder_memsave.finetune.data.stored.permutation import permuted_one
from thunder_memsave.finetune.data.stored.samples import StoredSamples

_STARTS, _SAMPLES = "row_starts.bin", "row_samples.bin"
_BLOCK = 16_384
"""Samples that are packed together: enough that rows are as full as if all were, and few enough to be held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPlaces:
    """What was written."""

    num_documents: int
    """Samples of the row that has most."""
    digest: str
    """Hash of all places."""


def write_places(
    directory: Path,
    samples: StoredSamples,
    *,
    length: int,
    packing: bool,
    max_documents: int | None,
) -> WrittenPlaces:
    """Write which samples each row has, every sample as often as an epoch has it.

    Args:
        directory: Where the files are written.
        samples: Of at most `length` tokens.
        length: Tokens per row.
        packing: Whether a row may have several samples.
        max_documents: Samples per row; None: as many as there is room for.
    """
    most, content = 0, sha256()
    starts, chosen = directory / _STARTS, directory / _SAMPLES
    with NumbersWriter(starts, "<i8") as rows, NumbersWriter(chosen, "<i8") as numbers:
        for indices, lengths in _blocks(samples):
            if packing:
                places = best_fits(lengths, length, max_documents)
            else:
                places = [[index] for index in range(len(lengths))]
            for place in places:
                most = max(most, len(place))
                content.update(rows.append([numbers.count]))
                content.update(numbers.append([indices[index] for index in place]))
        rows.append([numbers.count])
        rows.finish()
        numbers.finish()
    return WrittenPlaces(num_documents=most, digest=content.hexdigest())


def _blocks(samples: StoredSamples) -> Iterator[tuple[list[int], list[int]]]:
    """Yield indices and lengths of samples, in blocks; a second time those that an epoch has twice, and so on."""
    indices: list[int] = []
    lengths: list[int] = []
    earlier, most_times = 0, 1
    while earlier < most_times:
        for start in range(0, len(samples), _BLOCK):
            count = min(_BLOCK, len(samples) - start)
            found = samples.lengths_and_times(start, count)
            most_times = max(most_times, int(found[:, 1].max()))
            for index in np.flatnonzero(found[:, 1] > earlier).tolist():
                indices.append(start + index)
                lengths.append(int(found[index, 0]))
                if len(indices) == _BLOCK:
                    yield indices, lengths
                    indices, lengths = [], []
        earlier += 1
    if indices:
        yield indices, lengths


class StoredPlaces(Sequence[list[int]]):
    """The samples of each row, read when asked for; rows are shuffled once, always alike."""

    def __init__(self, directory: Path) -> None:
        self._starts = StoredNumbers(directory / _STARTS, "<i8")
        self._samples = StoredNumbers(directory / _SAMPLES, "<i8")

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        """Read the samples of one row, or of several."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        # Neighbours were in the same block: an evaluation of the first rows alone would see one end of the data.
        row = permuted_one(range(len(self))[index], len(self), key="rows")
        start, end = self._starts.read(row, 2).tolist()
        found: list[int] = self._samples.read(start, end - start).tolist()
        return found
