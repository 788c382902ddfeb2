"""Lays samples into rows of one length, and keeps their documents apart."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thunder_memsave.finetune.data.tokenize import IGNORED, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Some rows; int64 tensors of shape (rows, length)."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    """Positions, counted from 0 in each document."""

    document_ids: Tensor
    """1, 2, ... for the documents of a row, 0 for padding."""

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device."""
        return Batch(
            input_ids=self.input_ids.to(device),
            targets=self.targets.to(device),
            position_ids=self.position_ids.to(device),
            document_ids=self.document_ids.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """All rows of a data set, as lists of samples; tensors are made per batch."""

    samples: Sequence[Sample]
    places: Sequence[Sequence[int]]
    """Sample numbers of each row, in order."""

    length: int
    """Tokens per row."""

    pad_id: int
    """Token of padding positions."""

    def __len__(self) -> int:
        return len(self.places)

    @property
    def fingerprint(self) -> str:
        """Hash of every token, target and place: equal for equal training data."""
        content = hashlib.sha256(f"{self.length} {self.places}".encode())
        for sample in self.samples:
            content.update(sample.input_ids.tobytes())
            content.update(sample.targets.tobytes())
        return content.hexdigest()[:16]

    def lay_out(self, chosen: Sequence[int | None]) -> Batch:
        """Make the tensors of some rows; None gives a padding row."""
        batch = _padding(len(chosen), self.length, self.pad_id)
        for number, row in enumerate(chosen):
            if row is not None:
                _lay_out_row(batch, number, [self.samples[index] for index in self.places[row]])
        return batch


def pack(samples: Sequence[Sample], *, length: int, pad_id: int, seed: int) -> Rows:
    """Put several samples into each row: the longest first, each where it leaves the least room."""
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index]))
    places: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys that have rows, sorted: at most `length`
    for index in order:
        num_tokens = len(samples[index])
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
        left = room - num_tokens
        if left not in rows_by_room:
            insort(rooms, left)
        rows_by_room.setdefault(left, []).append(row)
    # Packing sorts the rows by document length; without a shuffle the run would see them in that order.
    random.Random(seed).shuffle(places)
    return Rows(samples=samples, places=places, length=length, pad_id=pad_id)


def pad(samples: Sequence[Sample], *, length: int, pad_id: int) -> Rows:
    """Put each sample into a row of its own."""
    places = [(index,) for index in range(len(samples))]
    return Rows(samples=samples, places=places, length=length, pad_id=pad_id)


def block_diagonal_mask(document_ids: Tensor) -> Tensor:
    """Return a mask in which each position attends to its own document's earlier positions.

    Args:
        document_ids: (rows, length).

    Returns:
        Booleans (rows, 1, length, length), true where attention is allowed. Padding attends to padding,
        so every position has something to attend to.
    """
    same_document = document_ids[:, :, None] == document_ids[:, None, :]
    return same_document.tril()[:, None]


def _padding(num_rows: int, length: int, pad_id: int) -> Batch:
    return Batch(
        input_ids=torch.full((num_rows, length), pad_id),
        targets=torch.full((num_rows, length), IGNORED),
        # Positions of padding count up, as in a document of its own: some models detect resets of positions.
        position_ids=torch.arange(length).repeat(num_rows, 1),
        document_ids=torch.zeros((num_rows, length), dtype=torch.long),
    )


def _lay_out_row(batch: Batch, row: int, samples: Sequence[Sample]) -> None:
    start = 0
    for number, sample in enumerate(samples, start=1):
        end = start + len(sample)
        batch.input_ids[row, start:end] = torch.from_numpy(sample.input_ids.astype(np.int64))
        batch.targets[row, start:end] = torch.from_numpy(sample.targets.astype(np.int64))
        batch.position_ids[row, start:end] = torch.arange(end - start)
        batch.document_ids[row, start:end] = number
        start = end
    batch.position_ids[row, start:] = torch.arange(batch.position_ids.shape[1] - start)
