"""Short sequences of allocations in expandable segments; `allocator_sequences.py` says where they come from."""

from __future__ import annotations

from harness.allocator_events import M, Sequence
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings

_EXPANDABLE = AllocatorSettings(expandable_segments=True)

EXPANDING = (
    Sequence(
        name="a small expandable segment has pages of 2 MiB",
        decided_by="find_expandable_block, map_block",
        events="a=1000 b=1M c=1M",
        settings=_EXPANDABLE,
        reserved=(2, 2, 4),
        segments=((1024, M, M, -(2 * M - 1024)),),
    ),
    Sequence(
        name="a large one has pages of 20 MiB",
        decided_by="find_expandable_block, map_block",
        events="a=2M",
        settings=_EXPANDABLE,
        reserved=(20,),
        segments=((2 * M, -18 * M),),
    ),
    Sequence(
        name="it grows behind what is free at its end",
        decided_by="find_expandable_block, try_allocate_expandable_block",
        events="a=30M b=20M",
        settings=_EXPANDABLE,
        reserved=(40, 60),
        segments=((30 * M, 20 * M, -10 * M),),
    ),
    Sequence(
        name="a free block at its end grows to a larger one",
        decided_by="try_allocate_expandable_block, map_block",
        events="a=30M -a b=50M",
        settings=_EXPANDABLE,
        reserved=(40, 40, 60),
        segments=((50 * M, -10 * M),),
    ),
    Sequence(
        name="a hole that is too small is lost",
        decided_by="find_expandable_block",
        events="a=30M b=10M c=20M -b d=20M",
        settings=_EXPANDABLE,
        reserved=(40, 40, 60, 60, 80),
        segments=((30 * M, -10 * M, 20 * M, 20 * M),),
    ),
    Sequence(
        name="a large rest of 512 is split off",
        decided_by="should_split",
        events="a=20M-1000",
        settings=_EXPANDABLE,
        reserved=(20,),
        segments=((20 * M - 512, -512),),
        allocated=20 * M - 512,
    ),
    Sequence(
        name="a hole is preferred to the end that can grow",
        decided_by="get_free_block",
        # The end is smaller, 4 of 10 MiB, but counts with all that it could grow by.
        events="a=10M b=6M -a c=3M",
        settings=_EXPANDABLE,
        reserved=(20, 20, 20, 20),
        segments=((3 * M, -7 * M, 6 * M, -4 * M),),
    ),
    Sequence(
        name="free pages are given back from the middle, and mapped there first",
        decided_by="unmap_block, find_expandable_block",
        events="a=20M b=40M c=20M -b empty d=20M",
        settings=_EXPANDABLE,
        reserved=(20, 60, 80, 80, 40, 60),
        segments=((20 * M, 20 * M), (20 * M,)),
    ),
    Sequence(
        name="a page that is partly used stays",
        decided_by="unmap_block",
        events="a=30M b=30M -a empty",
        settings=_EXPANDABLE,
        reserved=(40, 60, 60, 40),
        segments=((-10 * M, 30 * M),),
    ),
    Sequence(
        name="a segment without pages is gone",
        decided_by="release_blocks",
        events="a=30M -a empty",
        settings=_EXPANDABLE,
        reserved=(40, 40, 0),
        segments=(),
    ),
    Sequence(
        name="pages are given back before memory runs out",
        decided_by="malloc, unmap_block",
        events="a=20M b=40M c=20M -b d=60M",
        settings=_EXPANDABLE,
        limit=100,
        reserved=(20, 60, 80, 80, 100),
        segments=((20 * M,), (20 * M, 60 * M)),
        retries=1,
    ),
    Sequence(
        name="each stream has its own segment",
        decided_by="find_expandable_block",
        events="a=2M@0 b=2M@1",
        settings=_EXPANDABLE,
        reserved=(20, 40),
        segments=((2 * M, -18 * M), (2 * M, -18 * M)),
    ),
    Sequence(
        name="pages that were mapped in vain are given back",
        decided_by="try_allocate_expandable_block, malloc",
        # 20 MiB are mapped before the free 20, the 40 behind them are too many.
        events="a=20M b=20M -a empty -b c=70M",
        settings=_EXPANDABLE,
        limit=60,
        reserved=(20, 40, 40, 20, 20, 0),
        retries=1,
    ),
    Sequence(
        name="its pages are as large as large segments",
        decided_by="find_expandable_block",
        events="a=2M b=70M",
        settings=AllocatorSettings(expandable_segments=True, large_segment_bytes=64 * M),
        reserved=(64, 128),
        segments=((2 * M, 70 * M, -56 * M),),
    ),
    Sequence(
        name="it has addresses for 9/8 of the device, then another begins",
        decided_by="ExpandableSegment, find_expandable_block",
        events="a=20M b=20M c=280M -a empty d=30M e=50M",
        settings=_EXPANDABLE,
        device=320,
        reserved=(20, 40, 320, 320, 300, 340, 400),
        segments=((20 * M, 280 * M, 30 * M, -10 * M), (50 * M, -10 * M)),
    ),
    Sequence(
        name="unmapped neighbours merge",
        decided_by="unmap_block, try_merge_blocks, get_free_block",
        # The 10 MiB that b leaves can grow by c and d, to more than the 45 MiB that g leaves.
        events="a=10M b=10M c=20M d=20M e=10M g=45M h=5M -c empty -d empty -b -g z=8M",
        settings=_EXPANDABLE,
        reserved=(20, 20, 40, 60, 80, 120, 120, 120, 100, 100, 80, 80, 80, 80),
        segments=((10 * M, -10 * M), (10 * M, 8 * M, -37 * M, 5 * M)),
    ),
)
