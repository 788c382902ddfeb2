"""Buffers of the host are made once, and come back when the tensors in them die."""

from __future__ import annotations

import re

import pytest
import torch

from harness.memory import measured_peak_bytes
from thunder_memsave.errors import HostMemoryError
from thunder_memsave.ops.host_copies.buffers import HostBuffers


def test_a_buffer_comes_back_when_its_tensor_dies_and_is_given_out_again() -> None:
    buffers = HostBuffers()
    first = buffers.take(4096)
    first.fill_(7)
    assert (first.shape, first.dtype, buffers.count()) == ((4096,), torch.uint8, 4096)
    view, address = first[10:], first.data_ptr()
    del first
    assert buffers.count() == 4096, "a view of it lives"
    del view
    assert buffers.count() == 0
    again = buffers.take(4096)
    assert again.data_ptr() == address
    assert (buffers.made_bytes, buffers.peak_bytes) == (4096, 4096)


def test_it_is_no_memory_of_torch() -> None:
    buffers = HostBuffers()
    assert measured_peak_bytes(lambda: buffers.take(2**20)) == 0


def test_beyond_the_limit_free_buffers_of_other_sizes_go_and_then_it_is_an_error() -> None:
    buffers = HostBuffers()
    buffers.limit_bytes = 10_000
    held = buffers.take(4000)
    buffers.take(5000)
    longer = buffers.take(6000)
    assert buffers.made_bytes == 10_000, "the free one of 5,000 is gone"
    message = "offload needs 1 bytes more of the host, where 10,000 wait for a backward"
    with pytest.raises(HostMemoryError, match=re.escape(message)):
        buffers.take(1)
    del longer
    assert buffers.take(6000).shape == (6000,)
    assert held.shape == (4000,)


def test_pages_are_locked_once_and_unlocked_when_a_buffer_goes() -> None:
    seen: list[str] = []

    def lock(address: int, nbytes: int) -> object:
        seen.append(f"lock {nbytes}")
        return lambda: seen.append(f"unlock {nbytes}")

    buffers = HostBuffers(lock)  # type: ignore[arg-type]
    buffers.limit_bytes = 5000
    for _ in range(3):
        buffers.take(4000)
    buffers.take(2000)
    assert seen == ["lock 4000", "unlock 4000", "lock 2000"]
