"""Replays a sequence of allocations and frees through the simulated allocator."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from thunder_memsave.planner.caching_allocator.allocator import CachingAllocator
from thunder_memsave.planner.caching_allocator.blocks import Block


@dataclass(frozen=True, slots=True)
class Allocate:
    """A tensor's memory is allocated."""

    key: Hashable
    """Names the memory until it is freed."""
    nbytes: int
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Free:
    """The memory of a key is freed."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class EmptyCache:
    """`torch.cuda.empty_cache()` is called."""


Event: TypeAlias = Allocate | Free | EmptyCache


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Bytes after each event, as torch's `memory_allocated` and `memory_reserved` count them."""

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_retries: int
    """Number of times the cache was emptied because the device had no memory left."""


def replay(events: Iterable[Event], allocator: CachingAllocator) -> Replayed:
    """Replay events in their order, and return what was allocated and reserved after each.

    Raises:
        SimulatedOutOfMemoryError: the allocator's device has too little memory.
        KeyError: memory is freed that is not allocated.
    """
    blocks: dict[Hashable, Block | None] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    for event in events:
        if isinstance(event, Allocate):
            blocks[event.key] = allocator.allocate(event.nbytes, event.stream)
        elif isinstance(event, Free):
            allocator.free(blocks.pop(event.key))
        else:
            allocator.empty_cache()
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return Replayed(
        allocated_bytes=tuple(allocated),
        reserved_bytes=tuple(reserved),
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_retries=allocator.num_retries,
    )
