"""Lays samples into rows of one length, and keeps their documents apart."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thunder_memsave.finetune.data.tokenize import IGNORED, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Some rows; int64 tensors of shape (rows, length), unless said otherwise."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    """Positions, counted from 0 in each document."""

    document_ends: Tensor
    """Where each document ends in its row, int32 of (rows, documents): cumulative lengths. Rows have room for as many
    documents; those that a row lacks repeat its last end."""

    num_targets: Tensor
    """How many targets are not `IGNORED`: an int64 scalar, which stays on the CPU."""

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device; to a GPU from pinned memory without waiting for the copy."""
        ahead = device.type == "cuda"
        return self._each(lambda tensor: tensor.to(device, non_blocking=ahead))

    def pin_memory(self) -> Batch:
        """Copy the batch into memory that a GPU can read by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            input_ids=change(self.input_ids),
            targets=change(self.targets),
            position_ids=change(self.position_ids),
            document_ends=change(self.document_ends),
            num_targets=self.num_targets,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """All rows of a data set, as lists of samples; tensors are made per batch."""

    samples: Sequence[Sample]
    places: Sequence[Sequence[int]]
    """Sample numbers of each row, in order."""

    length: int
    """Tokens per row."""

    num_documents: int
    """Documents for which each row has room."""

    pad_id: int
    """Token of padding positions."""

    known_fingerprint: str | None = None
    """The fingerprint, of rows that were hashed when they were stored."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def fingerprint(self) -> str:
        """Hash of every token, target and place: equal for equal training data."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        content = hashlib.sha256(f"{self.length} {self.places}".encode())
        for sample in self.samples:
            content.update(sample.input_ids.tobytes())
            content.update(sample.targets.tobytes())
        return content.hexdigest()[:16]

    def lay_out(self, chosen: Sequence[int | None]) -> Batch:
        """Make the tensors of some rows; None gives a padding row."""
        batch = _padding(len(chosen), self.length, self.num_documents, self.pad_id)
        for number, row in enumerate(chosen):
            if row is not None:
                _lay_out_row(batch, number, [self.samples[index] for index in self.places[row]])
        batch.num_targets.copy_((batch.targets != IGNORED).sum())
        return batch


def pack(
    samples: Sequence[Sample],
    *,
    length: int,
    pad_id: int,
    seed: int,
    max_documents: int | None = None,
) -> Rows:
    """Put several samples into each row: the longest first, each where it leaves the least room.

    Args:
        samples: Of at most `length` tokens.
        length: Tokens per row.
        pad_id: Token of padding positions.
        seed: Of the order of the rows.
        max_documents: Samples per row; None: as many as there is room for.
    """
    places = best_fits([len(sample) for sample in samples], length, max_documents)
    # Packing sorts the rows by document length; without a shuffle the run would see them in that order.
    random.Random(seed).shuffle(places)
    return Rows(
        samples=samples,
        places=places,
        length=length,
        num_documents=max_documents or max(map(len, places), default=1),
        pad_id=pad_id,
    )


def best_fits(lengths: Sequence[int], length: int, max_documents: int | None) -> list[list[int]]:
    """Return the samples of each row, by their indices.

    Args:
        lengths: Of the samples, at most `length`.
        length: Tokens per row.
        max_documents: Samples per row; None: as many as there is room for.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    places: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys that have rows, sorted: at most `length`
    for index in order:
        num_tokens = lengths[index]
        nearest = bisect_left(rooms, num_tokens)
        if nearest < len(rooms):
            room = rooms[nearest]
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[rooms.pop(nearest)]
        else:
            room, row = length, len(places)
            places.append([])
        places[row].append(index)
        if len(places[row]) == max_documents:
            continue
        left = room - num_tokens
        if left not in rows_by_room:
            insort(rooms, left)
        rows_by_room.setdefault(left, []).append(row)
    return places


def pad(samples: Sequence[Sample], *, length: int, pad_id: int) -> Rows:
    """Put each sample into a row of its own."""
    places = [(index,) for index in range(len(samples))]
    return Rows(samples=samples, places=places, length=length, num_documents=1, pad_id=pad_id)


def _padding(num_rows: int, length: int, num_documents: int, pad_id: int) -> Batch:
    return Batch(
        input_ids=torch.full((num_rows, length), pad_id),
        targets=torch.full((num_rows, length), IGNORED),
        # Positions of padding count up, as in a document of its own: some models detect resets of positions.
        position_ids=torch.arange(length).repeat(num_rows, 1),
        document_ends=torch.zeros((num_rows, num_documents), dtype=torch.int32),
        num_targets=torch.zeros((), dtype=torch.int64),
    )


def _lay_out_row(batch: Batch, row: int, samples: Sequence[Sample]) -> None:
    start = 0
    for number, sample in enumerate(samples):
        end = start + len(sample)
        batch.input_ids[row, start:end] = torch.from_numpy(sample.input_ids.astype(np.int64))
        batch.targets[row, start:end] = torch.from_numpy(sample.targets.astype(np.int64))
        batch.position_ids[row, start:end] = torch.arange(end - start)
        batch.document_ends[row, number:] = end
        start = end
    batch.position_ids[row, start:] = torch.arange(batch.position_ids.shape[1] - start)
