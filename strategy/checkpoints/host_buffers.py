"""Host memory for copies of a run's state: kept from one save to the next, and lent to one copy at a time."""

from __future__ import annotations

import logging
import threading
import weakref

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 512
"""Each tensor begins at a multiple of it, as on a GPU: no dtype needs more, and aligned copies are the fastest."""

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all devices."""

_log = logging.getLogger(__name__)


class HostBuffers:
    """One piece of host memory that grows as needed; pinned where a GPU copies into it."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._kept: Tensor | None = None
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """The bytes that are kept and lent to nobody."""
        return 0 if self._kept is None else self._kept.nbytes

    def lend(self, num_bytes: int, *, device_type: str) -> Loan:
        """Lend memory until the loan is returned; what was lent before stays as it is.

        Args:
            num_bytes: As `padded_bytes` counts the tensors that are to be copied.
            device_type: Type of their device.
        """
        with self._lock:
            memory, self._kept = self._kept, None
        if memory is None or memory.nbytes < num_bytes:
            del memory  # before there is more
            memory = _new_memory(num_bytes, is_pinned=device_type == "cuda")
        return Loan(memory, self)

    def take_back(self, memory: Tensor) -> None:
        """Keep memory that was lent; of two pieces the larger one."""
        with self._lock:
            if self.kept_bytes <= memory.nbytes:
                self._kept = memory


class Loan:
    """Memory that holds copies of tensors until it is returned."""

    def __init__(self, memory: Tensor, owner: HostBuffers) -> None:
        self._memory: Tensor | None = memory
        self._owner, self._used_bytes = owner, 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor; one on a GPU is there once its stream has been waited for.

        Returns:
            A tensor whose storage is its part of the memory alone, so that it can be pickled.
        """
        assert self._memory is not None, "it was returned"
        start, nbytes = self._used_bytes, tensor.nbytes
        self._used_bytes += _padded(nbytes)
        # As for `Tensor.to`: the strides of a dense tensor stay.
        like = torch.empty_like(tensor, device="meta")
        if not nbytes:
            return torch.empty_like(tensor, device="cpu")
        part = self._memory.numpy()[start : start + nbytes]
        flat = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype)
        return flat.as_strided(like.shape, like.stride()).copy_(tensor, non_blocking=True)

    def give_back(self) -> None:
        """Return the memory, which the next copy overwrites; only the first call counts."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._owner.take_back(memory)


def padded_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes that copies of tensors take."""
    return sum(_padded(tensor.nbytes) for tensor in tensors)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _new_memory(num_bytes: int, *, is_pinned: bool) -> Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if is_pinned and num_bytes:
        _pin(memory)
    return memory


def _pin(memory: Tensor) -> None:
    """Pin memory as it is: torch's own allocator of pinned memory would round its size up to a power of two."""
    cudart = torch.cuda.cudart()
    address = memory.data_ptr()
    error = int(cudart.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if error:
        _log.warning(
            "%.2f GiB of host memory for copies of the state cannot be pinned (CUDA error %d; see `ulimit -l`), so "
            "that saves in the background keep training waiting longer.",
            memory.nbytes / 2**30,
            error,
        )
        return
    unpinned = weakref.finalize(memory.untyped_storage(), cudart.cudaHostUnregister, address)
    unpinned.atexit = False  # CUDA may be gone by then, and has unpinned all
