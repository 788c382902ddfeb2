"""Decides for each row of a file whether it is held out for validation, and how often an epoch has it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from thunder_memsave.finetune.data.stored.permutation import permuted


class Shares:
    """The parts of one file's rows, the same ones in every run; rows are asked for in order."""

    def __init__(self, *, num_rows: int, num_held_out: int, weight: float) -> None:
        self._num_rows, self._num_held_out = num_rows, num_held_out
        self._num_train = num_rows - num_held_out
        whole, part = divmod(weight, 1.0)
        self._whole = int(whole)
        self._num_once_more = round(part * self._num_train)
        self._next = self._next_train = 0

    @property
    def num_seen(self) -> int:
        """Count the rows that were asked for."""
        return self._next

    def next_rows(self, count: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return whether each of the next rows is held out, and how often an epoch has it if not."""
        rows = np.arange(self._next, self._next + count)
        self._next += count
        held_out = np.zeros(count, bool)
        if self._num_held_out:
            held_out = permuted(rows, self._num_rows, key="validation") < self._num_held_out
        # Numbers among the rows that are not held out.
        numbers = self._next_train + np.cumsum(~held_out) - 1
        self._next_train += int(np.count_nonzero(~held_out))
        times = np.full(count, self._whole)
        if self._num_once_more:
            order = permuted(numbers[~held_out], self._num_train, key="weight")
            times[~held_out] += order < self._num_once_more
        return held_out, times
