"""Writes whole numbers into a file, and reads any of them back without holding the others."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt


class NumbersWriter:
    """Appends whole numbers of one kind to a new file; use it in a `with`."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._file: BinaryIO = path.open("xb")
        self.count = 0
        """Numbers written."""

    def __enter__(self) -> NumbersWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, numbers: npt.ArrayLike) -> bytes:
        """Append numbers, and return their bytes."""
        array = np.asarray(numbers, dtype=self._dtype)
        content = array.tobytes()
        self._file.write(content)
        self.count += array.size
        return content

    def finish(self) -> None:
        """Wait until the disk has everything, so that the file is whole once it has its final name."""
        self._file.flush()
        os.fsync(self._file.fileno())


class StoredNumbers:
    """The numbers of such a file. They stay readable if the file is deleted meanwhile."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        # Not mapped into memory: mapped pages count as this process's memory once they were read.
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def __len__(self) -> int:
        return self._num_bytes // self._dtype.itemsize

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Return `count` numbers from `start` on.

        Raises:
            OSError: the disk fails, or the file is shorter than it was.
        """
        size = self._dtype.itemsize
        content = os.pread(self._descriptor, count * size, start * size)
        if len(content) < count * size:
            raise OSError(f"a file of stored tokens ends before number {start + count}")
        return np.frombuffer(content, dtype=self._dtype)
