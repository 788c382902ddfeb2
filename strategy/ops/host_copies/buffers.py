"""Buffers of the host that copies go to: made once, given out again and again.

A buffer is plain memory of the process, not of torch's allocator, so torch counts none of it. It comes back when the
tensor in it dies, whatever ended that: a backward, an exception in the middle of one, or a result that nobody
differentiated. With `retain_graph=True` the tensor, and so the buffer, lives on.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thunder_memsave.errors import HostMemoryError


def is_dense(value: Tensor) -> bool:
    """Tell whether a tensor's elements lie one after the other, in any order of its dims, with nothing between."""
    if value.layout != torch.strided:
        return False
    strides = value.stride()
    outermost_first = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return value.permute(outermost_first).is_contiguous()


def bytes_of(value: Tensor) -> Tensor:
    """Return a dense tensor's bytes, in the order of its memory."""
    return value.detach().as_strided((value.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    memory: mmap.mmap
    unlock: Callable[[], None] | None
    """Gives page-locked memory back to the system; None: it is not locked."""


class HostBuffers:
    """The buffers of one kind of device, by their size."""

    def __init__(self, lock_pages: Callable[[int, int], Callable[[], None]] | None = None) -> None:
        """`lock_pages(address, nbytes)` lets the device read and write memory directly; it returns what undoes that."""
        self.limit_bytes: int | None = None
        """Most bytes of all buffers; None: no limit."""
        self.made_bytes = 0
        """Bytes of all buffers there are."""
        self.taken_bytes = 0
        """Bytes of those that tensors are in."""
        self.peak_bytes = 0
        """Most bytes taken at once."""
        self._lock_pages = lock_pages
        self._free: dict[int, list[_Buffer]] = {}
        # Filled by finalizers, which may run at any time and in any thread, also while `_lock` is held.
        self._returned: deque[_Buffer] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Return a tensor of uint8 on the CPU, of shape `(nbytes,)`, in a buffer that comes back when it dies.

        Raises:
            HostMemoryError: all buffers together would be larger than the limit.
        """
        with self._lock:
            self._take_back()
            free = self._free.get(nbytes)
            buffer = free.pop() if free else self._make(nbytes)
            self.taken_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        lease = np.frombuffer(buffer.memory, dtype=np.uint8)
        weakref.finalize(lease, self._returned.append, buffer).atexit = False
        return torch.from_numpy(lease)

    def count(self) -> int:
        """Return the bytes that are taken now."""
        with self._lock:
            self._take_back()
            return self.taken_bytes

    def _take_back(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            nbytes = len(buffer.memory)
            self._free.setdefault(nbytes, []).append(buffer)
            self.taken_bytes -= nbytes

    def _make(self, nbytes: int) -> _Buffer:
        self._make_room(nbytes)
        memory = mmap.mmap(-1, nbytes)
        unlock = None
        if self._lock_pages is not None:
            address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            unlock = self._lock_pages(address, nbytes)
        self.made_bytes += nbytes
        return _Buffer(memory, unlock)

    def _make_room(self, nbytes: int) -> None:
        """Drop free buffers of other sizes, as after a batch of another length, if the limit needs their memory."""
        limit = self.limit_bytes
        if limit is None:
            return
        for size in sorted(self._free, reverse=True):
            while self.made_bytes + nbytes > limit and self._free[size]:
                dropped = self._free[size].pop()
                if dropped.unlock is not None:
                    dropped.unlock()
                self.made_bytes -= size
        if self.made_bytes + nbytes > limit:
            raise HostMemoryError(
                f"offload needs {nbytes:,} bytes more of the host, where {self.taken_bytes:,} wait for a backward, and "
                f"memory.host_budget is {limit:,}, which is planned for one call of the module at a time. Run each "
                "backward before the next forward, drop results that are not differentiated, or raise it."
            )
