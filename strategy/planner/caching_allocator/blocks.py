"""Keeps the allocator's blocks: neighbours of a segment in a list, and the free ones of a pool in best-fit order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator


class Segment:
    """Addresses that an expandable segment may map pages to."""

    __slots__ = ("page_bytes", "start")

    def __init__(self, *, start: int, page_bytes: int) -> None:
        self.start, self.page_bytes = start, page_bytes


class Block:
    """Adjacent bytes of one segment: allocated, free, or, in an expandable segment, without memory."""

    __slots__ = (
        "address",
        "is_allocated",
        "is_mapped",
        "next",
        "pool",
        "previous",
        "requested_bytes",
        "segment",
        "size",
        "stream",
    )

    def __init__(
        self,
        pool: Pool,
        *,
        stream: int,
        address: int,
        size: int,
        segment: Segment | None = None,
        is_mapped: bool = True,
    ) -> None:
        self.pool, self.stream, self.address, self.size = pool, stream, address, size
        self.segment, self.is_mapped = segment, is_mapped
        self.is_allocated, self.requested_bytes = False, 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether no other block is in its segment."""
        return self.previous is None and self.next is None

    def split_off(self, size: int) -> Block:
        """Make a block of the first `size` bytes, and keep the rest."""
        front = Block(
            self.pool,
            stream=self.stream,
            address=self.address,
            size=size,
            segment=self.segment,
            is_mapped=self.is_mapped,
        )
        front.previous, front.next = self.previous, self
        if self.previous is not None:
            self.previous.next = front
        self.previous = front
        self.address += size
        self.size -= size
        return front

    def merge(self, other: Block | None) -> None:
        """Take in a neighbour that is as free and as mapped (`try_merge_blocks`)."""
        if other is None or other.is_allocated or other.is_mapped != self.is_mapped:
            return
        other.pool.remove(other)
        self.size += other.size
        if other is self.previous:
            self.address, self.previous = other.address, other.previous
            if self.previous is not None:
                self.previous.next = self
        else:
            self.next = other.next
            if self.next is not None:
                self.next.previous = self


class Pool:
    """The free blocks of one size class, and the unmapped ones of its expandable segments."""

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self._free: list[tuple[int, int, int, Block]] = []
        self._unmapped: list[tuple[int, int, Block]] = []

    def add(self, block: Block) -> None:
        """Take up a free or unmapped block."""
        if block.is_mapped:
            insort(self._free, _by_size(block))
        else:
            insort(self._unmapped, _by_address(block))

    def remove(self, block: Block) -> None:
        """Give up a free or unmapped block."""
        if block.is_mapped:
            del self._free[bisect_left(self._free, _by_size(block))]
        else:
            del self._unmapped[bisect_left(self._unmapped, _by_address(block))]

    def at_least(self, stream: int, size: int) -> Iterator[Block]:
        """Yield a stream's free blocks of `size` bytes or more, by size, then by address (`BlockComparatorSize`)."""
        for number in range(bisect_left(self._free, (stream, size)), len(self._free)):
            of_stream, _, _, block = self._free[number]
            if of_stream != stream:
                return
            yield block

    def largest_first(self, stream: int) -> list[Block]:
        """Return a stream's free blocks, the largest first."""
        start = bisect_left(self._free, (stream,))
        end = bisect_left(self._free, (stream + 1,))
        return [block for *_, block in reversed(self._free[start:end])]

    def free_blocks(self) -> list[Block]:
        """Return the free blocks of all streams."""
        return [block for *_, block in self._free]

    def unmapped_blocks(self, stream: int) -> Iterator[Block]:
        """Yield a stream's unmapped blocks by address (`BlockComparatorAddress`)."""
        for of_stream, _, block in self._unmapped:
            if of_stream == stream:
                yield block


def _by_size(block: Block) -> tuple[int, int, int, Block]:
    return (block.stream, block.size, block.address, block)


def _by_address(block: Block) -> tuple[int, int, Block]:
    return (block.stream, block.address, block)
