"""Copies within the CPU's memory by two threads, one for each direction: as asynchronous as on a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Literal

from torch import Tensor

_Copy = tuple[int, int, int, Future[None]]


class CpuEngine:
    """One thread copies out, another one back; each does one copy after the other."""

    def __init__(self) -> None:
        self._queues: dict[str, SimpleQueue[_Copy]] = {}

    def begin(
        self, source: Tensor, target: Tensor, direction: Literal["out", "in"]
    ) -> Callable[[], None]:
        """Begin a copy; the wait for it holds up the calling thread."""
        ended: Future[None] = Future()
        self._queue(direction).put((target.data_ptr(), source.data_ptr(), source.numel(), ended))
        return ended.result

    def _queue(self, direction: str) -> SimpleQueue[_Copy]:
        """Return the queue of a thread, which is started with the first copy."""
        if (queue := self._queues.get(direction)) is None:
            queue = self._queues[direction] = SimpleQueue()
            name = f"thunder-memsave-copy-{direction}"
            threading.Thread(target=_copy_all, args=(queue,), name=name, daemon=True).start()
        return queue


def _copy_all(queue: SimpleQueue[_Copy]) -> None:
    while True:
        target, source, nbytes, ended = queue.get()
        # It releases the GIL, has no threads of its own, and allocates nothing.
        ctypes.memmove(target, source, nbytes)
        ended.set_result(None)
