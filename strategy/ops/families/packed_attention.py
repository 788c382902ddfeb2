"""Causal attention within each document of packed rows, whose ends are given as numbers and not as a mask.

Rows of several documents have their boundaries in one int32 tensor of a fixed size, so that one captured graph serves
rows with different numbers of documents: positions in all rows one after the other, as variable-length flash kernels
want them. Each row has as many entries, those of its documents (repeated where it has fewer) and of its padding. Two
rows of 8 positions, of the documents 3 + 2 and 8, with room for two:

    [0, 3, 5, 8,   16, 16, 16]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Document(NamedTuple):
    """The positions of one document, or of the padding of a row."""

    row: int
    start: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return its part of (rows, heads, length, ...)."""
        return tensor[self.row : self.row + 1, :, self.start : self.end]


class Run(NamedTuple):
    """Documents of one row and one length, one after the other, which one call of a kernel takes as a batch."""

    row: int
    start: int
    length: int
    """Positions of each document."""
    num: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return its part of (rows, heads, length, ...) as a view of (num, heads, length of a document, ...)."""
        part: Tensor = tensor[self.row, :, self.start : self.start + self.num * self.length]
        each: Tensor = part.unflatten(1, (self.num, self.length))
        return each.transpose(0, 1)


def boundaries_of(document_ends: Tensor, length: int) -> Tensor:
    """Return the boundaries of all rows.

    Args:
        document_ends: (rows, documents): where each ends in its row; those that a row lacks repeat the last.
        length: Positions of a row.
    """
    num_rows = document_ends.shape[0]
    starts = torch.arange(num_rows, dtype=torch.int32, device=document_ends.device) * length
    ends = torch.cat([document_ends + starts[:, None], starts[:, None] + length], dim=1)
    return torch.cat([ends.new_zeros(1), ends.flatten()])


def whole_rows(boundaries: Tensor, num_rows: int, length: int) -> None:
    """Write the boundaries of rows with one document each, for which attention takes the longest."""
    num_documents = _num_entries(boundaries.numel(), num_rows) - 1
    ends = torch.full((num_rows, num_documents), length, dtype=torch.int32)
    boundaries.copy_(boundaries_of(ends, length))


def padding_starts(boundaries: Tensor, num_rows: int) -> Tensor:
    """Return where the padding of each row starts, in all rows one after the other."""
    num_entries = _num_entries(boundaries.numel(), num_rows)
    return boundaries[num_entries - 1 :: num_entries]


def documents(boundaries: Tensor, num_rows: int, length: int) -> Iterator[Document]:
    """Yield all documents; without numbers, on a fake tensor, whole rows."""
    if _has_no_numbers(boundaries):
        yield from (Document(row, 0, length) for row in range(num_rows))
        return
    numbers = boundaries.tolist()
    num_entries = _num_entries(len(numbers), num_rows)
    for entry, (start, end) in enumerate(pairwise(numbers)):
        row, number = divmod(entry, num_entries)
        if start < end and number < num_entries - 1:  # the last is padding
            yield Document(row, start - row * length, end - row * length)


def runs(boundaries: Tensor, num_rows: int, length: int) -> Iterator[Run]:
    """Yield all documents, neighbours of one length together: fewer and larger calls give each the same bits."""
    found = documents(boundaries, num_rows, length)
    for (row, each), group in groupby(found, key=lambda d: (d.row, d.end - d.start)):
        members = list(group)
        yield Run(row, members[0].start, each, len(members))


def paddings(boundaries: Tensor, num_rows: int, length: int) -> Iterator[Document]:
    """Yield the padding of each row that has some; none without numbers."""
    if not _has_no_numbers(boundaries):
        for row, start in enumerate(padding_starts(boundaries, num_rows).tolist()):
            if start < (row + 1) * length:
                yield Document(row, start - row * length, length)


def band_of(length: int, window: int | None, like: Tensor) -> Tensor | None:
    """Return what a window adds to the scores of a document, (length, length) in the dtype and on the device of `like`.

    None: the document is no longer than the window, so that it is causal.
    """
    if window is None or length <= window:
        return None
    allowed = (
        torch.ones(length, length, dtype=torch.bool, device=like.device).tril().triu(1 - window)
    )
    return torch.zeros_like(allowed, dtype=like.dtype).masked_fill_(~allowed, -torch.inf)


def _has_no_numbers(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _num_entries(num_boundaries: int, num_rows: int) -> int:
    """Count the documents of a row for which there is room, and its padding."""
    return (num_boundaries - 1) // num_rows


def mask_between(boundaries: Tensor, num_rows: int, length: int, window: int | None) -> Tensor:
    """Compute `packed_mask` by operators of PyTorch's, each of which a plan sees."""
    positions = torch.arange(num_rows * length, dtype=torch.int32, device=boundaries.device)
    of = torch.searchsorted(boundaries[1:], positions, right=True).view(num_rows, length)
    allowed = (of[:, :, None] == of[:, None, :]).tril()
    return (allowed if window is None else allowed.triu(1 - window))[:, None]


@torch.library.custom_op("thunder_memsave::packed_mask", mutates_args=())
def packed_mask(
    boundaries: Tensor, num_rows: int, length: int, window: int | None = None
) -> Tensor:
    """Return the mask that keeps the documents of packed rows apart; padding attends to padding.

    Captured as an argument of attention, it is never made: its boundaries are read instead.

    Args:
        boundaries: See `boundaries_of`.
        num_rows: Rows.
        length: Positions of a row.
        window: Positions that each attends to at most, itself included; None: all of its document before it.

    Returns:
        Booleans (rows, 1, length, length), true where attention is allowed.
    """
    return mask_between(boundaries, num_rows, length, window)


@packed_mask.register_fake
def _(boundaries: Tensor, num_rows: int, length: int, window: int | None = None) -> Tensor:
    return boundaries.new_empty((num_rows, 1, length, length), dtype=torch.bool)


PACKED_MASK = torch.ops.thunder_memsave.packed_mask.default


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention of each document to itself; zero in the padding after a row's last document.

    Args:
        query: (rows, heads, length, width).
        key: As `query`; with `enable_gqa`, with fewer heads.
        value: As `key`.
        boundaries: See `boundaries_of`.
        dropout_p: As in `scaled_dot_product_attention`, like the next two.
        scale: Factor of the scores.
        enable_gqa: Whether several heads of queries share one of keys and values.
        window: Positions that each attends to at most, itself included; None: all of its document before it.
    """
    num_rows, _, length, _ = query.shape
    result = torch.zeros_like(query)
    for document in documents(boundaries, num_rows, length):
        band = band_of(document.end - document.start, window, query)
        attended = F.scaled_dot_product_attention(
            document.of(query),
            document.of(key),
            document.of(value),
            attn_mask=band,
            dropout_p=dropout_p,
            is_causal=band is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        document.of(result).copy_(attended)
    return result
