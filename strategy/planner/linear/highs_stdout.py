"""Keeps HiGHS's debug output off standard output.

When a solution violates a tolerance, its C++ code prints `HighsMipSolverData::transformNewIntegerFeasibleSolution
tmpSolver.run();` even with all output off (https://github.com/jump-dev/HiGHS.jl/issues/312; scipy 1.17 has that
version). Delete this file when scipy comes with a HiGHS that does not.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_STDOUT = 1
_NOISE = b"HighsMipSolverData::"


@contextmanager
def without_noise_of_highs() -> Iterator[None]:
    """Drop what HiGHS prints; everything else printed meanwhile, by other threads too, appears at the end."""
    _flush()
    try:
        stdout = os.dup(_STDOUT)
    except OSError:  # closed: nothing can be printed
        yield
        return
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), _STDOUT)
        try:
            yield
        finally:
            _flush()
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            _print_again(printed.fileno())


def _flush() -> None:
    """Flush Python's buffer and C's."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _print_again(file: int) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    lines = os.read(file, os.fstat(file).st_size).splitlines(keepends=True)
    if wanted := b"".join(line for line in lines if not line.startswith(_NOISE)):
        os.write(_STDOUT, wanted)
