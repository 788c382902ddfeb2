"""Lays samples into rows of one length, each document apart from its neighbours."""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_memsave.finetune.tokenize import IGNORED, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Every row of a set; all tensors are int64 of shape (num_rows, length)."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    """Counts from 0 in each document."""

    document_ids: Tensor
    """1, 2, ... for the documents of a row, 0 for padding."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.input_ids.shape[1]


def pack(samples: Sequence[Sample], *, length: int, pad_id: int, seed: int) -> Rows:
    """Put several samples into each row: the longest first, each where it leaves least room."""
    order = sorted(range(len(samples)), key=lambda index: -len(samples[index].input_ids))
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for index in order:
        num_tokens = len(samples[index].input_ids)
        place = bisect.bisect_left(room, (num_tokens, -1))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = length, len(rows)
            rows.append([])
        rows[row].append(index)
        bisect.insort(room, (free - num_tokens, row))
    # Rows come sorted by length of document; and so would a run without shuffling see them.
    random.Random(seed).shuffle(rows)
    return _lay_out([[samples[index] for index in row] for row in rows], length, pad_id)


def pad(samples: Sequence[Sample], *, length: int, pad_id: int) -> Rows:
    """Put each sample into a row of its own."""
    return _lay_out([[sample] for sample in samples], length, pad_id)


def block_diagonal_mask(document_ids: Tensor) -> Tensor:
    """Allow each position its own document's earlier positions.

    Args:
        document_ids: (rows, length).

    Returns:
        Booleans (rows, 1, length, length), true where attention is allowed. Padding sees padding,
        so no position is without anything to attend to.
    """
    same_document = document_ids[:, :, None] == document_ids[:, None, :]
    return same_document.tril()[:, None]


def _lay_out(rows: Sequence[Sequence[Sample]], length: int, pad_id: int) -> Rows:
    input_ids = torch.full((len(rows), length), pad_id)
    targets = torch.full((len(rows), length), IGNORED)
    # Padding counts on, as a document of its own: some models look at resets of the positions.
    position_ids = torch.zeros((len(rows), length), dtype=torch.long)
    document_ids = torch.zeros((len(rows), length), dtype=torch.long)
    for row, samples in enumerate(rows):
        start = 0
        for number, sample in enumerate(samples, start=1):
            end = start + len(sample.input_ids)
            input_ids[row, start:end] = torch.tensor(sample.input_ids)
            targets[row, start:end] = torch.tensor(sample.targets)
            position_ids[row, start:end] = torch.arange(end - start)
            document_ids[row, start:end] = number
            start = end
        position_ids[row, start:] = torch.arange(length - start)
    return Rows(
        input_ids=input_ids, targets=targets, position_ids=position_ids, document_ids=document_ids
    )
