"""Copies between a CUDA device and page-locked memory on two streams, ordered by events.

Events, not `record_stream`: a copy starts after all that the computing stream was given before it, and what that
stream is given after the wait runs after the copy. So memory that is freed after the wait, of the source or the
destination, is reused only by work that comes later on the computing stream, as the allocator requires; and a buffer of
the host that comes back after the wait is written to again only by a copy that starts later. One small run on a GPU has
tried it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from thunder_memsave.errors import HostMemoryError


class CudaEngine:
    """One stream copies out, another one back."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._streams = {direction: torch.cuda.Stream(place) for direction in ("out", "in")}

    def begin(
        self, source: Tensor, target: Tensor, direction: Literal["out", "in"]
    ) -> Callable[[], None]:
        """Begin a copy; the wait for it holds up the computing stream, and not the host."""
        stream = self._streams[direction]
        # The destination of a copy back may have been freed by work that has not run yet, so it waits too.
        stream.wait_event(torch.cuda.current_stream(self._place).record_event())
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        copied = stream.record_event()
        return lambda: torch.cuda.current_stream(self._place).wait_event(copied)


def lock_pages(address: int, nbytes: int) -> Callable[[], None]:
    """Lock memory of the process, without which copies would be neither fast nor asynchronous.

    Raises:
        HostMemoryError: the driver refuses.
    """
    runtime = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, nbytes, 0)
    if int(error) != 0:
        raise HostMemoryError(
            f"{nbytes:,} bytes of the host's memory could not be page-locked for offload ({error}); other programs may "
            "hold it, or a limit of the container (`ulimit -l`). Lower memory.host_budget, or set memory.offload to "
            "none."
        )
    return lambda: runtime.cudaHostUnregister(address)
