"""The rows of a data set as the training loop sees them, whatever a row contains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

BatchT_co = TypeVar("BatchT_co", covariant=True)


class RowSet(Protocol[BatchT_co]):
    """Numbered rows that can be laid out as batches."""

    def __len__(self) -> int:
        """Count the rows."""

    def lay_out(self, chosen: Sequence[int | None]) -> BatchT_co:
        """Make a batch of rows by number, on the CPU; None gives a row whose loss and weight are 0."""
