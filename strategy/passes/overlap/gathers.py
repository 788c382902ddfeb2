"""Starts gathers as early as the window and the room allow, and joins small ones."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, pairwise

from thunder.core import prims
from thunder.core.dtypes import to_torch_dtype
from thunder.core.symbol import BoundSymbol

from thunder_memsave.ops.families.collectives import (
    all_gather_bucket,
    is_all_gather,
    is_wait,
)
from thunder_memsave.passes.overlap.facts import Kind, kind_of, nbytes_of, with_sources
from thunder_memsave.passes.overlap.room import BudgetLeft


@dataclass(frozen=True, slots=True)
class _Gather:
    bsym: BoundSymbol
    reader: int
    """Number of the first operation that reads the parameter."""
    held_until: int
    """Number of the operation that begins the last run of consecutive readers; until then it is held for later ones."""
    wait: int
    """Position of the symbol that waits for it."""
    future: str
    num_bytes: int
    start_bytes: int
    """Peak bytes from its start to its wait."""
    kind: Kind

    @property
    def num_held_bytes(self) -> int:
        """Bytes that stay live after the first reader, for a later one."""
        return self.num_bytes if self.held_until > self.reader else 0


def gathers_in_order(
    symbols: Sequence[BoundSymbol],
    operations: Mapping[int, int],
    left: BudgetLeft,
    *,
    leave_out: Set[str],
) -> Iterator[_Gather]:
    """Yield the gathers in the order in which they are waited for, but for those named."""
    starts = {
        b.output.name: b for b in symbols if is_all_gather(b) and b.output.name not in leave_out
    }
    readers, num_operations = _readers(symbols, operations), 0
    for position, bsym in enumerate(symbols):
        if is_wait(bsym) and (start := starts.get(bsym.args[0].name)) is not None:
            yield _Gather(
                bsym=start,
                reader=num_operations,
                held_until=_begin_of_last_row(readers.get(start.output.name, ())),
                wait=position,
                future=start.output.name,
                num_bytes=nbytes_of(start.output),
                start_bytes=left.start_bytes(start.output.name, nbytes_of(start.output)),
                kind=kind_of(start),
            )
        num_operations += id(bsym) in operations


def casts_of_shards(symbols: Sequence[BoundSymbol]) -> dict[str, list[BoundSymbol]]:
    """Return, by the names of shards that the trace makes and gathers, the symbols that make them, in order.

    Others are arguments. A shard is made by casts of one (`passes/quantize_before_gather.py`), or is a copy of one that
    is on the host (`passes/fetch_weights.py`).
    """
    producers = {
        o.name: b for b in symbols for o in b.flat_proxy_outs if not b.sym.name.startswith("unpack")
    }
    casts: dict[str, list[BoundSymbol]] = {}
    for bsym in symbols:
        if not is_all_gather(bsym):
            continue
        made: list[BoundSymbol] = []
        name = shard = bsym.args[0].name
        while (producer := producers.get(name)) is not None:
            made.insert(0, producer)
            name = producer.args[0].name
        if made:
            casts[shard] = made
    return casts


def _readers(
    symbols: Sequence[BoundSymbol], operations: Mapping[int, int]
) -> Mapping[str, Sequence[int]]:
    """Return the numbers of the operations that read each gathered parameter, by future; empty if it is returned."""
    readers = defaultdict[str, list[int]](list)
    source_of: dict[str, str] = {}
    for bsym, source in with_sources(symbols):
        read = {source_of[a.name] for a in bsym.flat_proxy_args if a.name in source_of}
        if source is not None:
            source_of.update((o.name, source) for o in bsym.flat_proxy_outs)
        elif bsym.sym is prims.python_return:
            readers.update((future, []) for future in read)
        else:
            for future in read:
                readers[future].append(operations[id(bsym)])
    return readers


def _begin_of_last_row(numbers: Sequence[int]) -> int:
    """Return the first number of the last consecutive run in a sorted sequence; 0 if it is empty."""
    begin = 0
    for before, number in pairwise([-2, *numbers]):
        begin = number if number > before + 1 else begin
    return begin


class Gathers:
    """The gathers that have not started, and those in flight with their bytes."""

    def __init__(
        self,
        gathers: Sequence[_Gather],
        left: BudgetLeft,
        window_bytes: int,
        bucket_bytes: int,
        bytes_to_come: Callable[[BoundSymbol], int],
    ) -> None:
        """`bytes_to_come` says what a gather's shard takes that is still on the host."""
        self._waiting = deque(gathers)
        """Gathers from the first that has not started; some of the later ones may have."""
        self._left, self._bytes_to_come = left, bytes_to_come
        self._window_bytes, self._bucket_bytes = window_bytes, bucket_bytes
        self._started: set[str] = set()
        self._in_flight: dict[str, _Gather] = {}
        self._held: list[tuple[int, int]] = []
        """A heap of (operation until which the bytes are held, bytes)."""
        self._room = window_bytes
        self._next_early: list[_Gather] | None = None
        """The next bucket that the window alone allows; cached until a gather starts."""

    def reach(self, operation: int) -> None:
        """Advance to an operation; parameters read now, or next in one run, no longer count against the window."""
        while self._held and self._held[0][0] <= operation:
            self._room += heappop(self._held)[1]

    def start_early(self) -> Iterator[BoundSymbol]:
        """Start the buckets that the window has room for; a bucket is at most half of it."""
        limit = min(self._bucket_bytes, self._window_bytes // 2)
        while self._waiting:
            if self._next_early is None:
                self._next_early = self._bucket(limit, ahead_bytes=limit)
            bucket = self._that_fit(self._next_early)
            if not self._fits(bucket) or sum(g.num_bytes for g in bucket) > self._room:
                return
            yield self._start(bucket)

    def start_for(self, future: str) -> Iterator[BoundSymbol]:
        """Start the gather that is waited for now, unless it is in flight, with others if the window has room."""
        if future not in self._in_flight:
            first = self._waiting[0]
            assert first.future == future, "gathers start in the order of their waits"
            ahead_bytes = max(0, self._room - first.num_held_bytes)
            bucket = self._bucket(self._bucket_bytes, ahead_bytes=ahead_bytes)
            yield self._start(self._that_fit(bucket))
        gather = self._in_flight.pop(future)
        heappush(self._held, (gather.held_until, gather.num_bytes))

    def _bucket(self, limit: int, *, ahead_bytes: int) -> list[_Gather]:
        """Return the next gather and small ones after it, at most `ahead_bytes` of them for later operations."""
        first = self._waiting[0]
        bucket, num_bytes = [first], first.num_bytes
        if num_bytes > limit:
            return bucket
        for gather in islice(self._waiting, 1, None):
            if gather.num_bytes > limit or gather.kind != first.kind:
                continue
            if gather.future in self._started:
                continue
            is_ahead = gather.reader != first.reader
            ahead_bytes -= gather.num_bytes if is_ahead else gather.num_held_bytes
            num_bytes += gather.num_bytes
            if ahead_bytes < 0 or num_bytes > limit:
                break
            bucket.append(gather)
        return bucket

    def _that_fit(self, bucket: list[_Gather]) -> list[_Gather]:
        """Return the bucket's first gathers that fit the room; those that are read now have to start anyway."""
        if self._fits(bucket):
            return bucket
        for num in range(1, len(bucket)):
            is_ahead = bucket[num].reader != bucket[0].reader
            if is_ahead and not self._fits(bucket[: num + 1]):
                return bucket[:num]
        return bucket

    def _fits(self, bucket: Sequence[_Gather]) -> bool:
        num_bytes = sum(self._taken(g, bucket) for g in bucket)
        return self._left.fits(num_bytes, max(g.wait for g in bucket))

    def _start(self, bucket: Sequence[_Gather]) -> BoundSymbol:
        for gather in bucket:
            self._left.take(self._taken(gather, bucket), gather.wait)
        self._in_flight.update((g.future, g) for g in bucket)
        self._started.update(g.future for g in bucket)
        self._room -= sum(g.num_bytes for g in bucket)
        self._next_early = None
        while self._waiting and self._waiting[0].future in self._started:
            self._waiting.popleft()
        if len(bucket) == 1:
            return bucket[0].bsym
        symbols = [g.bsym for g in bucket]
        return all_gather_bucket.bind(
            [b.args[0] for b in symbols],
            symbols[0].args[1],
            to_torch_dtype(symbols[0].output.dtype),
            output=tuple(b.output for b in symbols),
        )

    def _taken(self, gather: _Gather, bucket: Sequence[_Gather]) -> int:
        """Return the bytes that a gather takes; a bucket of several may copy each once more."""
        return gather.start_bytes * min(2, len(bucket)) + self._bytes_to_come(gather.bsym)
