"""Allocates and frees blocks as torch's `DeviceCachingAllocator` does, on a device that it only counts the bytes of."""

from __future__ import annotations

from collections.abc import Iterator

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.planner.caching_allocator.blocks import Block, Pool, Segment
from thunder_memsave.planner.caching_allocator.settings import (
    SMALL_BYTES,
    AllocatorSettings,
    round_up,
)

_UNLIMITED_BYTES = 2**40
_DEFAULT = AllocatorSettings()


class SimulatedOutOfMemoryError(ThunderMemsaveError, RuntimeError):
    """The simulated device has no memory for a segment, even after the cache was emptied."""

    code = None


class CachingAllocator:
    """A simulated allocator: best fit in segments that are reserved from the device and kept when they are free.

    Addresses rise from segment to segment, and none is used twice; a driver may choose others, which changes nothing
    but the choice among free blocks of one size.
    """

    def __init__(
        self,
        settings: AllocatorSettings = _DEFAULT,
        *,
        limit_bytes: int | None = None,
        allowed_bytes: int | None = None,
        device_bytes: int = _UNLIMITED_BYTES,
    ) -> None:
        """Begin with nothing reserved.

        Args:
            settings: As torch reads them from the environment.
            limit_bytes: Bytes that the device gives to segments; None: it never runs out.
            allowed_bytes: Bytes that `torch.cuda.set_per_process_memory_fraction` allows; None: as many as there are.
                Where segments are expandable, a request counts whole and its pages do not, so that more than this may
                be reserved, and a request refused for which little would have to be mapped.
            device_bytes: The device's memory, by which an expandable segment's addresses are counted.
        """
        self._settings, self._device_bytes = settings, device_bytes
        self._limit_bytes, self._allowed_bytes = limit_bytes, allowed_bytes
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._allocated: set[Block] = set()
        self._next_address = 0
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        """Number of times the cache was emptied because the device had no memory left."""

    def allocate(self, nbytes: int, stream: int = 0) -> Block | None:
        """Allocate as `malloc` does.

        Returns:
            The block, to be passed to `free`; None for 0 bytes, which take no memory.

        Raises:
            SimulatedOutOfMemoryError: the device's limit is reached, and emptying the cache does not help.
        """
        if nbytes == 0:
            return None
        size = self._settings.rounded(nbytes)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached(pool, size, stream)
        if block is None:
            block = self._reserved(pool, size, stream)
        else:
            pool.remove(block)
        if self._settings.splits(block.size, size, is_small=pool.is_small):
            rest, block = block, block.split_off(size)
            pool.add(rest)
        block.is_allocated, block.requested_bytes = True, nbytes
        self._allocated.add(block)
        self._count_allocated(block.size, nbytes)
        return block

    def free(self, block: Block | None) -> None:
        """Free what `allocate` returned, and merge it with free neighbours (`free_block`)."""
        if block is None:
            return
        assert block.is_allocated, "a block is freed once"
        self._count_allocated(-block.size, -block.requested_bytes)
        block.is_allocated = False
        self._allocated.remove(block)
        block.merge(block.previous)
        block.merge(block.next)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give free segments and free pages back to the device (`release_blocks`)."""
        for pool in (self._large, self._small):
            for block in pool.free_blocks():
                if block.segment is not None:
                    self._unmap(block, block.segment)
                elif block.is_whole_segment:
                    self._release(block)

    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Return the bytes of the blocks of each reserved range of addresses, those of free blocks below 0."""
        blocks = [*self._allocated, *self._large.free_blocks(), *self._small.free_blocks()]
        first = [b for b in blocks if b.previous is None or not b.previous.is_mapped]
        return tuple(tuple(_sizes(b)) for b in sorted(first, key=lambda b: b.address))

    def _cached(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Return the best fitting free block that may be used (`get_free_block`)."""
        found = pool.at_least(stream, size)
        block = next(found, None)
        if block is None:
            return None
        if self._settings.expandable_segments:
            # The tail of a segment counts with the bytes that it can grow by.
            for other in found:
                if _with_unmapped(other) >= _with_unmapped(block):
                    break
                block = other
        if not self._settings.is_oversize(size):
            return None if self._settings.is_oversize(block.size) else block
        return block if block.size < size + self._settings.max_rounding_bytes else None

    def _reserved(self, pool: Pool, size: int, stream: int) -> Block:
        """Return a block of new memory; if the device has none left, after giving back what is cached (`malloc`)."""
        block = self._grown(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._grown(pool, size, stream)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._grown(pool, size, stream)
        if block is None:
            limits = (self._limit_bytes, self._allowed_bytes)
            limit_bytes = min(limit for limit in limits if limit is not None)
            raise SimulatedOutOfMemoryError(
                f"{size} bytes cannot be allocated: {self.reserved_bytes} bytes of {limit_bytes} are reserved, "
                f"{self.allocated_bytes} of them allocated"
            )
        return block

    def _grown(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Return a free block in no pool, of a new segment or an expandable one that grew (`alloc_block`)."""
        nbytes = self._settings.segment_bytes(size)
        if self._allowed_bytes is not None and self.reserved_bytes + nbytes > self._allowed_bytes:
            return None
        if self._settings.expandable_segments:
            return self._expanded(pool, size, stream)
        if not self._has(nbytes):
            return None
        self._count_reserved(nbytes)
        return Block(pool, stream=stream, address=self._addresses(nbytes), size=nbytes)

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back free blocks that may not be split, enough for `size` (`release_available_cached_blocks`)."""
        limit_bytes = self._settings.max_split_bytes
        if limit_bytes is None:
            return False
        wanted_bytes = max(size, limit_bytes)
        large_enough = next(pool.at_least(stream, wanted_bytes), None)
        if large_enough is not None and large_enough.segment is None:
            self._release(large_enough)
            return True
        released_bytes = 0
        for block in pool.largest_first(stream):
            if released_bytes >= wanted_bytes or block.size < limit_bytes:
                break
            if block.segment is None:
                released_bytes += block.size
                self._release(block)
        return released_bytes >= wanted_bytes

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._count_reserved(-block.size)

    def _expanded(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map pages from the lowest address that has room for `size` bytes (`try_allocate_expandable_block`).

        Pages that were mapped before the device ran out stay mapped, and are free.
        """
        start = self._expandable(pool, size, stream)
        block = start if start.is_mapped else self._map(start, min(start.size, size))
        while block is not None and block.size < size:
            following = block.next
            assert following is not None, "the segment has addresses for the whole request"
            block = self._map(following, min(size - block.size, following.size))
        if block is not None:
            pool.remove(block)
        return block

    def _expandable(self, pool: Pool, size: int, stream: int) -> Block:
        """Return the first block that `size` bytes can begin with, unmapped or free, of a new segment if need be.

        As `find_expandable_block`: an unmapped block, or the free one before it.
        """
        for block in pool.unmapped_blocks(stream):
            before = block.previous
            start = block if before is None or before.is_allocated else before
            if _free_bytes_from(start, size) >= size:
                return start
        page_bytes = self._settings.page_bytes(is_small=pool.is_small)
        nbytes = round_up(self._device_bytes + self._device_bytes // 8, page_bytes)
        segment = Segment(start=self._addresses(nbytes), page_bytes=page_bytes)
        block = Block(
            pool,
            stream=stream,
            address=segment.start,
            size=nbytes,
            segment=segment,
            is_mapped=False,
        )
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map the first pages of an unmapped block, for `size` bytes or more, and merge them (`map_block`).

        Returns:
            A free block that ends with those pages or later; None if the device has no memory for them.
        """
        assert block.segment is not None
        nbytes = round_up(size, block.segment.page_bytes)
        if not self._has(nbytes):
            return None
        pool = block.pool
        pool.remove(block)
        if nbytes < block.size:
            rest, block = block, block.split_off(nbytes)
            pool.add(rest)
        block.is_mapped = True
        block.merge(block.previous)
        block.merge(block.next)
        pool.add(block)
        self._count_reserved(nbytes)
        return block

    def _unmap(self, block: Block, segment: Segment) -> None:
        """Unmap the pages that are whole within a free block (`unmap_block`)."""
        start = segment.start + round_up(block.address - segment.start, segment.page_bytes)
        end = block.address + block.size
        end -= (end - segment.start) % segment.page_bytes
        if start >= end:
            return
        pool = block.pool
        pool.remove(block)
        if start > block.address:
            pool.add(block.split_off(start - block.address))
        if end < block.address + block.size:
            rest, block = block, block.split_off(end - start)
            pool.add(rest)
        block.is_mapped = False
        block.merge(block.previous)
        block.merge(block.next)
        if not block.is_whole_segment:
            pool.add(block)
        self._count_reserved(start - end)

    def _has(self, nbytes: int) -> bool:
        return self._limit_bytes is None or self.reserved_bytes + nbytes <= self._limit_bytes

    def _addresses(self, nbytes: int) -> int:
        address = self._next_address
        self._next_address += nbytes
        return address

    def _count_allocated(self, nbytes: int, requested_bytes: int) -> None:
        self.allocated_bytes += nbytes
        self.requested_bytes += requested_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def _count_reserved(self, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)


def _sizes(first: Block) -> Iterator[int]:
    block: Block | None = first
    while block is not None and block.is_mapped:
        yield block.size if block.is_allocated else -block.size
        block = block.next


def _with_unmapped(block: Block) -> int:
    """Return the bytes to which a block of an expandable segment can grow."""
    following = block.next
    return block.size + (0 if following is None or following.is_mapped else following.size)


def _free_bytes_from(start: Block, enough_bytes: int) -> int:
    """Return the bytes that are not allocated from a block on, without a gap; it stops counting at `enough_bytes`."""
    nbytes, block = 0, start
    while nbytes < enough_bytes and not block.is_allocated:
        nbytes += block.size
        if block.next is None:
            break
        block = block.next
    return nbytes
