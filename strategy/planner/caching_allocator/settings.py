"""Holds the sizes by which the caching allocator rounds, splits and reserves."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 2**20

MIN_BLOCK_BYTES = 512
"""Bytes to a multiple of which every request is rounded up (`kMinBlockSize`)."""
SMALL_BYTES = _MIB
"""Largest request of the small pool in bytes (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * _MIB
"""Bytes of a segment, or of a page of an expandable one, in the small pool (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES = 20 * _MIB
"""Bytes of a segment for requests below `MIN_LARGE_BYTES`, or of a page of an expandable one, in the large pool.

It is the default of torch's setting `large_segment_size_mb`; before torch 2.11 it may be a constant.
"""
MIN_LARGE_BYTES = 10 * _MIB
"""Smallest request in bytes that gets a segment of its own size (`kMinLargeAlloc`)."""
ROUND_LARGE_BYTES = 2 * _MIB
"""Bytes to a multiple of which such a segment is rounded up (`kRoundLarge`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSettings:
    """The part of `PYTORCH_CUDA_ALLOC_CONF` that decides how many bytes are reserved."""

    expandable_segments: bool = False
    """Whether each pool of a stream has one segment that grows by pages, in place of many of fixed sizes."""
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    max_split_bytes: int | None = None
    """Blocks of this size in bytes or more are never split, nor given to smaller requests; None: all may be split."""
    max_rounding_bytes: int = LARGE_SEGMENT_BYTES
    """A request of `max_split_bytes` or more takes a block that exceeds it by less than this many bytes."""
    power2_divisions: int = 0
    """Number of equal parts into which powers of 2 are divided for rounding; 0 or 1: multiples of 512 bytes."""

    def rounded(self, nbytes: int) -> int:
        """Return the bytes of the block for a request (`round_size`)."""
        if nbytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        if self.power2_divisions > 1 and nbytes > MIN_BLOCK_BYTES * self.power2_divisions:
            return _next_division(nbytes, self.power2_divisions)
        return round_up(nbytes, MIN_BLOCK_BYTES)

    def segment_bytes(self, size: int) -> int:
        """Return the bytes of the segment that is reserved for a block of `size` (`get_allocation_size`)."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return round_up(size, ROUND_LARGE_BYTES)

    def page_bytes(self, *, is_small: bool) -> int:
        """Return the bytes by which an expandable segment grows (`find_expandable_block`)."""
        return SMALL_SEGMENT_BYTES if is_small else self.large_segment_bytes

    def is_oversize(self, nbytes: int) -> bool:
        """Tell whether a block or request is too large to be split, or to share a block."""
        return self.max_split_bytes is not None and nbytes >= self.max_split_bytes

    def splits(self, block_bytes: int, size: int, *, is_small: bool) -> bool:
        """Tell whether the rest of a block becomes a block of its own (`should_split`)."""
        rest = block_bytes - size
        if is_small or self.expandable_segments:
            return rest >= MIN_BLOCK_BYTES
        return not self.is_oversize(size) and rest > SMALL_BYTES


def round_up(nbytes: int, unit: int) -> int:
    """Round up to a multiple of `unit` bytes."""
    return -(-nbytes // unit) * unit


def _next_division(nbytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal parts between two powers of 2 (`roundup_power2_next_division`)."""
    if nbytes.bit_count() == 1:
        return nbytes
    floor = 1 << (nbytes.bit_length() - 1)
    part = floor >> (divisions.bit_length() - 1)
    return round_up(nbytes, part) if part else 2 * floor
