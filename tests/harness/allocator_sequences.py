"""Short sequences of allocations, with what torch's caching allocator reserves for them, derived from its source.

Each names the functions of `c10/cuda/CUDACachingAllocator.cpp` that decide it. Sizes of pools and segments are lines 17
to 25 of `c10/core/AllocatorConfig.h` in torch 2.11.0, 2.13.0 and 2.14.1, `large_segment_size_` line 338 in 2.11.0 and
340 in the others. Of these three versions, `libc10_cuda.so` itself gave the same bytes for every sequence here, run
over a CUDA runtime that only counts bytes and hands out rising addresses.
"""

from __future__ import annotations

from harness.allocator_events import M, Sequence
from harness.expandable_sequences import EXPANDING
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings

_MAX_SPLIT = AllocatorSettings(max_split_bytes=32 * M)

_ROUNDING = (
    Sequence(
        name="a byte takes a block of 512 in a small segment",
        decided_by="round_size, get_allocation_size",
        events="a=1",
        reserved=(2,),
        segments=((512, -(2 * M - 512)),),
        allocated=512,
    ),
    Sequence(
        name="sizes are rounded up to multiples of 512",
        decided_by="round_size",
        events="a=512 b=513",
        reserved=(2, 2),
        segments=((512, 1024, -(2 * M - 1536)),),
    ),
    Sequence(
        name="nothing takes nothing",
        decided_by="NativeCachingAllocator::allocate",
        events="a=0",
        reserved=(0,),
        segments=(),
        allocated=0,
    ),
    Sequence(
        name="small requests share a segment",
        decided_by="get_free_block, should_split",
        events="a=1000 b=3000",
        reserved=(2, 2),
        segments=((1024, 3072, -(2 * M - 4096)),),
        allocated=4096,
    ),
    Sequence(
        name="1 MiB is small",
        decided_by="get_pool, get_allocation_size",
        events="a=1M b=1M c=1M",
        reserved=(2, 2, 4),
        segments=((M, M), (M, -M)),
    ),
    Sequence(
        name="a byte more is large",
        decided_by="get_pool, get_allocation_size",
        events="a=1M+1",
        reserved=(20,),
        segments=((M + 512, -(19 * M - 512)),),
    ),
    Sequence(
        name="just below 10 MiB, a large segment is shared",
        decided_by="get_allocation_size, should_split",
        events="a=10M-512 b=10M-512",
        reserved=(20, 20),
        # The rest of 1024 bytes is not above 1 MiB: it stays with the block, and counts as allocated.
        segments=((10 * M - 512, 10 * M + 512),),
        allocated=20 * M,
    ),
    Sequence(
        name="10 MiB have their own segment",
        decided_by="get_allocation_size",
        events="a=10M b=2M",
        reserved=(10, 30),
        segments=((10 * M,), (2 * M, -18 * M)),
    ),
    Sequence(
        name="a segment of its own is rounded up to 2 MiB",
        decided_by="get_allocation_size, should_split",
        events="a=10M+1",
        reserved=(12,),
        segments=((10 * M + 512, -(2 * M - 512)),),
    ),
    Sequence(
        name="a large rest of 1 MiB is not split off",
        decided_by="should_split",
        events="a=11M",
        reserved=(12,),
        segments=((12 * M,),),
        allocated=12 * M,
    ),
    Sequence(
        name="a large rest above 1 MiB is split off",
        decided_by="should_split",
        events="a=11M-512",
        reserved=(12,),
        segments=((11 * M - 512, -(M + 512)),),
    ),
    Sequence(
        name="a small rest of 512 is split off",
        decided_by="should_split",
        events="a=1M b=1M-512 c=512",
        reserved=(2, 2, 2),
        segments=((M, M - 512, 512),),
    ),
    Sequence(
        name="powers of 2 are divided if it is asked for",
        decided_by="round_size, roundup_power2_next_division",
        # Above 4 x 512 bytes: 4200 goes to 5120, a quarter above 4096.
        events="a=2000 b=4200",
        settings=AllocatorSettings(power2_divisions=4),
        reserved=(2, 2),
        segments=((2048, 5120, -(2 * M - 7168)),),
    ),
    Sequence(
        name="the size of large segments is a setting",
        decided_by="get_allocation_size",
        events="a=2M b=10M",
        settings=AllocatorSettings(large_segment_bytes=64 * M),
        reserved=(64, 64),
        segments=((2 * M, 10 * M, -52 * M),),
    ),
)

_FITTING = (
    Sequence(
        name="a small request does not use the rest of a large segment",
        decided_by="get_pool",
        events="a=2M b=1000",
        reserved=(20, 22),
        segments=((2 * M, -18 * M), (1024, -(2 * M - 1024))),
    ),
    Sequence(
        name="the smallest block that fits is taken",
        decided_by="get_free_block, BlockComparatorSize",
        events="a=30M b=12M c=16M -c -a -b d=11M",
        reserved=(30, 42, 58, 58, 58, 58, 58),
        segments=((-30 * M,), (12 * M,), (-16 * M,)),
    ),
    Sequence(
        name="among equal blocks the lowest address is taken",
        decided_by="BlockComparatorSize",
        events="a=12M b=12M -b -a c=12M",
        reserved=(12, 24, 24, 24, 24),
        segments=((12 * M,), (-12 * M,)),
    ),
    Sequence(
        name="another stream does not use a cached large block",
        decided_by="get_free_block, BlockComparatorSize",
        events="a=12M@0 -a b=12M@1",
        reserved=(12, 12, 24),
        segments=((-12 * M,), (12 * M,)),
    ),
    Sequence(
        name="another stream does not use a small segment's rest",
        decided_by="get_free_block, BlockComparatorSize",
        events="a=1000@0 b=1000@1 c=1000@0",
        reserved=(2, 4, 4),
        segments=((1024, 1024, -(2 * M - 2048)), (1024, -(2 * M - 1024))),
    ),
    Sequence(
        name="free neighbours merge",
        decided_by="free_block, try_merge_blocks",
        events="a=2M b=2M c=2M -a -c -b d=20M",
        reserved=(20, 20, 20, 20, 20, 20, 20),
        segments=((20 * M,),),
    ),
    Sequence(
        name="a freed block merges with the one before",
        decided_by="free_block, try_merge_blocks",
        events="a=2M b=2M c=2M -a -b d=4M",
        reserved=(20, 20, 20, 20, 20, 20),
        segments=((4 * M, 2 * M, -14 * M),),
    ),
    Sequence(
        name="segments do not merge",
        decided_by="try_merge_blocks",
        events="a=20M b=20M -a -b c=40M",
        reserved=(20, 40, 40, 40, 80),
        segments=((-20 * M,), (-20 * M,), (40 * M,)),
    ),
    Sequence(
        name="the rest of a larger block is used",
        decided_by="alloc_found_block, get_free_block",
        events="a=40M -a b=30M c=10M",
        reserved=(40, 40, 40, 40),
        segments=((30 * M, 10 * M),),
    ),
    Sequence(
        name="a rest that is too small is lost",
        decided_by="get_free_block",
        events="a=40M -a b=30M c=12M",
        reserved=(40, 40, 40, 52),
        segments=((30 * M, -10 * M), (12 * M,)),
    ),
)

_RELEASING = (
    Sequence(
        name="emptying the cache gives back segments that are free as a whole",
        decided_by="release_blocks",
        events="a=30M b=2M c=22M -a -c empty",
        reserved=(30, 50, 72, 72, 72, 20),
        segments=((2 * M, -18 * M),),
    ),
    Sequence(
        name="emptying the cache gives back both pools",
        decided_by="release_cached_blocks",
        events="a=1000 b=2M -a -b empty",
        reserved=(2, 22, 22, 22, 0),
        segments=(),
    ),
    Sequence(
        name="the cache is emptied before memory runs out",
        decided_by="malloc, release_cached_blocks",
        events="a=30M -a b=32M",
        limit=40,
        reserved=(30, 30, 32),
        segments=((32 * M,),),
        retries=1,
    ),
    Sequence(
        name="a segment that is split is not given back",
        decided_by="malloc, release_blocks",
        events="a=30M -a b=10M c=22M",
        limit=40,
        reserved=(30, 30, 30, 30),
        retries=1,
    ),
    Sequence(
        name="the last byte of the device may be reserved",
        decided_by="alloc_block",
        events="a=30M b=10M",
        limit=40,
        reserved=(30, 40),
        segments=((30 * M,), (10 * M,)),
    ),
    Sequence(
        name="a full device has no small segment",
        decided_by="malloc, get_allocation_size",
        events="a=2M b=1000",
        limit=20,
        reserved=(20, 20),
        retries=1,
    ),
    Sequence(
        name="a cached block is used before the device is asked",
        decided_by="malloc, get_free_block",
        events="a=30M -a b=20M",
        limit=30,
        reserved=(30, 30, 30),
        segments=((20 * M, -10 * M),),
    ),
)

_OVERSIZE = (
    Sequence(
        name="a block above the largest that may be split is kept for its like",
        decided_by="get_free_block",
        events="a=40M -a b=20M",
        settings=_MAX_SPLIT,
        reserved=(40, 40, 60),
        segments=((-40 * M,), (20 * M,)),
    ),
    Sequence(
        name="a request above it takes a block that is a little larger, as a whole",
        decided_by="get_free_block, should_split",
        events="a=40M -a b=36M",
        settings=_MAX_SPLIT,
        reserved=(40, 40, 40),
        segments=((40 * M,),),
        allocated=40 * M,
    ),
    Sequence(
        name="but none that is 20 MiB larger",
        decided_by="get_free_block",
        events="a=56M -a b=36M",
        settings=_MAX_SPLIT,
        reserved=(56, 56, 92),
        segments=((-56 * M,), (36 * M,)),
    ),
    Sequence(
        name="such blocks are given back first, the largest before others",
        decided_by="release_available_cached_blocks",
        events="a=40M b=50M d=12M -a -b -d c=60M",
        settings=_MAX_SPLIT,
        limit=120,
        reserved=(40, 90, 102, 102, 102, 102, 72),
        segments=((-12 * M,), (60 * M,)),
    ),
)

SEQUENCES = (*_ROUNDING, *_FITTING, *_RELEASING, *_OVERSIZE, *EXPANDING)
