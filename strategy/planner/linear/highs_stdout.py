"""Keeps off standard output what HiGHS prints there whatever it is told.

`HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();` is printed by its C++ code where a solution
that it has found violates a tolerance, also with all output off (https://github.com/jump-dev/HiGHS.jl/issues/312; scipy
1.17 has that version). Can be deleted when scipy comes with a HiGHS that does not.
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
    """Whatever else is printed meanwhile, by other threads too, is printed at the end."""
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
    """What Python has buffered, and what C has."""
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _print_again(file: int) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    lines = os.read(file, os.fstat(file).st_size).splitlines(keepends=True)
    if wanted := b"".join(line for line in lines if not line.startswith(_NOISE)):
        os.write(_STDOUT, wanted)
