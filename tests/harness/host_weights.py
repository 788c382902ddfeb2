"""Lets weights as small as those of tests stay on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from thunder_memsave.budget.offload import streamed
from thunder_memsave.materialize import host_weights


@contextmanager
def small_host_weights() -> Iterator[None]:
    """Let weights from 1 KiB on stay on the host."""
    with (
        patch.object(host_weights, "LEAST_BYTES", 1024),
        patch.object(streamed, "LEAST_BYTES", 1024),
    ):
        yield
