"""Takes the CPU for a device that is not the host, so that `auto` may let plans copy to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from thunder_memsave.budget.offload import last_resort
from thunder_memsave.optim import on_host


@contextmanager
def as_elsewhere() -> Iterator[None]:
    """Take the CPU for a device that is not the host, and let small states be copied in several pieces."""
    with (
        patch.object(last_resort, "is_host", lambda _: False),
        patch.object(on_host, "PIECE_BYTES", 50_000),
    ):
        yield
