"""Short sequences whose segments were derived by hand from the C++ of PyTorch's caching allocator.

They were written down before the simulator was read, by other hands than it. What was read is
`c10/cuda/CUDACachingAllocator.cpp` of torch's main after pytorch/pytorch#169699, between 2.10 and 2.11. The lines are
those of tag v2.13.0, in which these functions read the same. Those of `find_expandable_block`, `map_block` and
`try_allocate_expandable_block` were counted back from `free_block`, which follows them, and that of the memory fraction
in `alloc_block` from its first: tag v2.13.0 has more between it and the expandable segments.

Events: `a 30M` allocates, `a 30M @1` does so on stream 1, `-a` frees, `empty` empties the cache. Segments: the blocks
of each range of addresses, those of free blocks in parentheses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A sequence, and what the allocator has after each of its events, in bytes."""

    name: str
    events: str
    allocated: str
    """After each event; the last one is left out where it raises."""
    reserved: str
    segments: str
    """After the last event."""
    line: str
    """Line of `CUDACachingAllocator.cpp` in tag v2.13.0 that decides, and its function."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    limit: str | None = None
    """What the device has; without end if None."""
    allowed: str | None = None
    """What the process may reserve by its memory fraction; as much as there is if None."""
    raises: bool = False
    """Whether the last event finds no memory."""
    retries: int = 0
    """Times that the whole cache was emptied for an allocation."""


SPLIT_40M = AllocatorSettings(max_split_bytes=40 * 2**20)
_DIVISIONS_4 = AllocatorSettings(power2_divisions=4)
_SEGMENTS_32M = AllocatorSettings(large_segment_bytes=32 * 2**20)

SIZES = (
    Derived(
        name="one byte takes 512 of a segment of 2 MiB",
        events="a 1",
        allocated="512",
        reserved="2M",
        segments="512 (2M-512)",
        line="3063 round_size, 3701 get_allocation_size",
    ),
    Derived(
        name="513 bytes take 1,024",
        events="a 512, b 513",
        allocated="512, 1536",
        reserved="2M, 2M",
        segments="512 1K (2M-1536)",
        line="3071 round_size",
    ),
    Derived(
        name="zero bytes take nothing",
        events="a 0, -a, b 1",
        allocated="0, 0, 512",
        reserved="0, 0, 2M",
        segments="512 (2M-512)",
        line="4958-4975 NativeCachingAllocator::allocate",
    ),
    Derived(
        name="one MiB is small",
        events="a 1M, b 1M, c 1M",
        allocated="1M, 2M, 3M",
        reserved="2M, 2M, 4M",
        segments="1M 1M | 1M (1M)",
        line="3665 get_pool",
    ),
    Derived(
        name="one byte more than one MiB takes a segment of 20 MiB",
        events="a 1M+1",
        allocated="1M+512",
        reserved="20M",
        segments="1M+512 (19M-512)",
        line="3703 get_allocation_size",
    ),
    Derived(
        name="below 10 MiB a segment has 20 MiB, whose rest of at most 1 MiB is not split off",
        events="a 10M-512, b 10M",
        allocated="10M-512, 20M",
        reserved="20M, 20M",
        segments="10M-512 10M+512",
        line="3695 should_split",
    ),
    Derived(
        name="from 10 MiB a segment is the request, rounded to 2 MiB",
        events="a 10M, b 10M+1",
        allocated="10M, 20M+512",
        reserved="10M, 22M",
        segments="10M | 10M+512 (2M-512)",
        line="3706 get_allocation_size",
    ),
    Derived(
        name="a large block's rest of exactly 1 MiB is not split off",
        events="a 11M",
        allocated="12M",
        reserved="12M",
        segments="12M",
        line="3696 should_split",
    ),
    Derived(
        name="a large block's rest of 512 bytes more than 1 MiB is split off",
        events="a 11M-512",
        allocated="11M-512",
        reserved="12M",
        segments="11M-512 (1M+512)",
        line="3696 should_split",
    ),
    Derived(
        name="a small block's rest of 512 bytes is split off",
        events="a 1M, b 1M-512, c 1",
        allocated="1M, 2M-512, 2M",
        reserved="2M, 2M, 2M",
        segments="1M 1M-512 512",
        line="3693 should_split",
    ),
    Derived(
        name="a small request takes no large block",
        events="a 20M, -a, b 1M",
        allocated="20M, 0, 1M",
        reserved="20M, 20M, 22M",
        segments="(20M) | 1M (1M)",
        line="3665 get_pool",
    ),
    Derived(
        name="a large request takes no small block",
        events="a 1M, b 1M, -a, -b, c 1M+1",
        allocated="1M, 2M, 1M, 0, 1M+512",
        reserved="2M, 2M, 2M, 2M, 22M",
        segments="(2M) | 1M+512 (19M-512)",
        line="3667 get_pool",
    ),
    Derived(
        name="with 4 divisions a request above 2 KiB is rounded to a quarter of its power of two",
        events="a 1200, b 5000",
        allocated="1536, 1536+5K",
        reserved="2M, 2M",
        segments="1536 5K (2M-1536-5K)",
        line="3068 round_size, 3051-3059 roundup_power2_next_division",
        settings=_DIVISIONS_4,
    ),
    Derived(
        name="the size of a segment is that of the request as rounded by its divisions",
        events="a 1M+1, b 18M",
        allocated="1M+256K, 21M+256K",
        reserved="20M, 40M",
        segments="1M+256K (18M+768K) | 20M",
        line="1731-1733 malloc",
        settings=_DIVISIONS_4,
    ),
    Derived(
        name="large segments have the size that is set",
        events="a 2M, b 12M, c 10M, d 20M",
        allocated="2M, 14M, 24M, 44M",
        reserved="32M, 32M, 32M, 52M",
        segments="2M 12M 10M (8M) | 20M",
        line="3704 get_allocation_size",
        settings=_SEGMENTS_32M,
    ),
)

FITS = (
    Derived(
        name="the smallest free block that fits is taken",
        events="a 30M, b 20M, c 40M, -a, -b, -c, d 18M",
        allocated="30M, 50M, 90M, 60M, 40M, 0, 18M",
        reserved="30M, 50M, 90M, 90M, 90M, 90M, 90M",
        segments="(30M) | 18M (2M) | (40M)",
        line="3719 get_free_block",
    ),
    Derived(
        name="of two blocks of one size the one with the lower address is taken",
        events="a 16M, b 16M, -b, -a, c 16M",
        allocated="16M, 32M, 16M, 0, 16M",
        reserved="16M, 32M, 32M, 32M, 32M",
        segments="16M | (16M)",
        line="3719 get_free_block, by BlockComparatorSize",
    ),
    Derived(
        name="a free block that is too small is left",
        events="a 12M, -a, b 14M",
        allocated="12M, 0, 14M",
        reserved="12M, 12M, 26M",
        segments="(12M) | 14M",
        line="3720 get_free_block",
    ),
    Derived(
        name="a block that is not split counts whole, and is freed whole",
        events="a 12M, -a, b 11M, -b",
        allocated="12M, 0, 12M, 0",
        reserved="12M, 12M, 12M, 12M",
        segments="(12M)",
        line="3696 should_split",
    ),
    Derived(
        name="requests share a segment of 20 MiB until none fits",
        events="a 9M, b 9M, c 2M, d 2M",
        allocated="9M, 18M, 20M, 22M",
        reserved="20M, 20M, 20M, 40M",
        segments="9M 9M 2M | 2M (18M)",
        line="3719 get_free_block",
    ),
    Derived(
        name="blocks of another stream are not taken",
        events="a 20M @1, -a, b 20M @2, c 20M @1",
        allocated="20M, 0, 20M, 40M",
        reserved="20M, 20M, 40M, 40M",
        segments="20M | 20M",
        line="3720 get_free_block",
    ),
    Derived(
        name="each stream has its own small segments",
        events="a 1K, b 1K @1, c 1K",
        allocated="1K, 2K, 3K",
        reserved="2M, 4M, 4M",
        segments="1K 1K (2M-2K) | 1K (2M-1K)",
        line="3720 get_free_block",
    ),
    Derived(
        name="a request from max_split_size on takes a block whole",
        events="a 60M, -a, b 41M",
        allocated="60M, 0, 60M",
        reserved="60M, 60M, 60M",
        segments="60M",
        line="3695 should_split",
        settings=SPLIT_40M,
    ),
    Derived(
        name="but not a block that is 20 MiB larger",
        events="a 62M, -a, b 42M",
        allocated="62M, 0, 42M",
        reserved="62M, 62M, 104M",
        segments="(62M) | 42M",
        line="3761-3764 get_free_block",
        settings=SPLIT_40M,
    ),
    Derived(
        name="a request below max_split_size takes no block from it on",
        events="a 60M, -a, b 30M",
        allocated="60M, 0, 30M",
        reserved="60M, 60M, 90M",
        segments="(60M) | 30M",
        line="3757-3759 get_free_block",
        settings=SPLIT_40M,
    ),
)

PLACED = SIZES + FITS
