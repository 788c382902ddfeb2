"""Schedule: collectives run beside computation, within a window of bytes.

Each gather starts before the operation that needs it, as early as the window allows; each reduction is waited for as
late as the window allows. Before:

    ft1 = all_gather_rows(w1, group, True, None)
    t1 = torch_wait_prim_impl(ft1)
    t5 = torch.nn.functional.linear(x, t1, None)
    ft2 = all_gather_rows(w2, group, True, None)
    t2 = torch_wait_prim_impl(ft2)
    t6 = torch.nn.functional.linear(t5, t2, None)

After, with a window of at least w2's bytes:

    ft1 = all_gather_rows(w1, group, True, None)
    t1 = torch_wait_prim_impl(ft1)
    ft2 = all_gather_rows(w2, group, True, None)    # on its way while linear runs
    t5 = torch.nn.functional.linear(x, t1, None)
    t2 = torch_wait_prim_impl(ft2)
    t6 = torch.nn.functional.linear(t5, t2, None)

Small parameters share a collective, and so do small gradients:

    (ft1, ft2) = all_gather_bucket([w1, w2], group, torch.float32)

While an operation runs, the gathered parameters on their way, or there but for later operations, are at most
`window_bytes`, and the whole gradients that wait for their reduction at most half of that. A parameter that was read
and will be read again, as a clone does (`recompute`), takes its room in the window; the plan alone decides on those, so
where they take more than the window nothing else is on its way. With a window of 0 only parameters that one operation
reads are joined. Every rank has the same trace, so all start their collectives in the same order.

Where a budget leaves less than the window (`room.py`), less is on its way: a gather starts as soon as it fits from
there to the operation that needs it, and the oldest reduction is waited for where what follows needs the room.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice, pairwise
from typing import Any

from torch import nn

from thunder_memsave import compat

compat.apply()

from thunder.core import prims  # noqa: E402
from thunder.core.dtypes import to_torch_dtype  # noqa: E402
from thunder.core.proxies import FutureTensorProxy, TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx  # noqa: E402

from thunder_memsave.collectives import (  # noqa: E402
    all_gather_bucket,
    all_reduce_bucket,
    is_all_gather,
    is_all_reduce,
    is_reduce_scatter,
    is_wait,
    reduce_scatter_bucket,
    reduces_in_place,
)
from thunder_memsave.passes.room import Left, Room  # noqa: E402
from thunder_memsave.passes.symbols import is_tensor  # noqa: E402
from thunder_memsave.sharding import whole_shape  # noqa: E402

_Kind = tuple[Any, ...]  # whether and how it sums, dtype, device, the group's id


def schedule(
    trace: TraceCtx, *, window_bytes: int, bucket_bytes: int = 0, room: Room | None = None
) -> TraceCtx:
    """Move collectives and the waits for them, and join small ones; nothing else.

    Args:
        trace: A forward, backward or inference trace, before values are deleted after their last use.
        window_bytes: Whole parameters on their way, and half as many of whole gradients on theirs; 0 overlaps nothing.
        bucket_bytes: Parameters and gradients of at most so many bytes share a collective of at most so many; 0: none.
        room: What else limits both, the same on all ranks; None: nothing.

    Returns:
        A trace with the same symbols in another order, but for the collectives that were joined.
    """
    if not any(is_wait(b) for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    with tracectx(new):
        new.bound_symbols = list(
            _Schedule(trace.bound_symbols, window_bytes, bucket_bytes, room).reordered()
        )
    new.set_provenance(TraceProvenance("Pass schedule"))
    return new


def two_largest_blocks(module: nn.Module) -> int:
    """Bytes of twice the largest repeated block, whole: one that is read, one on its way.

    A block is an element of an `nn.ModuleList`, or of an `nn.Sequential`; without any, the largest parameter counts.
    """
    blocks = [
        block
        for container in module.modules()
        if isinstance(container, nn.ModuleList | nn.Sequential)
        for block in container
    ]
    sizes = [sum(map(_whole_bytes, block.parameters())) for block in blocks]
    return 2 * max(sizes or [_whole_bytes(p) for p in module.parameters()] or [0])


def _whole_bytes(p: nn.Parameter) -> int:
    return whole_shape(p).numel() * p.element_size()


class _Schedule:
    """Places one symbol after the other, with the collectives that are due before it."""

    def __init__(
        self,
        symbols: Sequence[BoundSymbol],
        window_bytes: int,
        bucket_bytes: int,
        room: Room | None,
    ) -> None:
        self._symbols = symbols
        self._left = Left(room, symbols, for_others_bytes=_largest_reduction(symbols))
        futures = {
            o.name for b in symbols for o in b.flat_proxy_outs if isinstance(o, FutureTensorProxy)
        }
        self._operations = _operations(symbols)
        gathers = list(_gathers_in_order(symbols, self._operations, self._left))
        self._gathered = {g.future for g in gathers}
        self._reduced = futures - self._gathered
        self._gathers = _Gathers(gathers, self._left, window_bytes, bucket_bytes)
        # A gradient on its way takes twice its bytes: what is sent, and what is received.
        self._reductions = _Reductions(self._left, window_bytes // 2, bucket_bytes)

    def reordered(self) -> Iterator[BoundSymbol]:
        for position, bsym in enumerate(self._symbols):
            self._left.reach(position)
            if not self._ends_reduction(bsym):  # it frees what was sent
                yield from self._make_room()
            yield from self._place(bsym)

    def _make_room(self) -> Iterator[BoundSymbol]:
        while self._reductions.take_too_much:
            yield from self._end_oldest()

    def _ends_reduction(self, bsym: BoundSymbol) -> bool:
        return is_wait(bsym) and bsym.args[0].name in self._reduced

    def _place(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        future = bsym.args[0].name if is_wait(bsym) else None
        if is_all_gather(bsym) and bsym.output.name in self._gathered:
            return  # it starts when the window has room, at the latest right before its wait
        if future in self._gathered:
            yield from self._gathers.start_for(future)
            yield bsym
        elif future in self._reduced:
            yield from self._postpone(bsym)
        elif not self._reductions.postponed_with_its_input(bsym):
            yield from self._with_its_input(bsym)

    def _postpone(self, wait: BoundSymbol) -> Iterator[BoundSymbol]:
        self._reductions.postpone(wait)
        while self._reductions.are_overdue:
            yield from self._end_oldest()

    def _with_its_input(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        while self._reductions.give_input_to(bsym):
            yield from self._end_oldest()
        if not bsym.sym.name.startswith("unpack"):  # of the trace's inputs, shards among them
            yield from self._start_early(bsym)
        yield from self._reductions.start(bsym)

    def _start_early(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        self._gathers.reach(self._operations.get(id(bsym), 0))
        starts = list(self._gathers.start_early())
        yield from self._make_room()
        yield from starts

    def _end_oldest(self) -> Iterator[BoundSymbol]:
        """Nothing is started early beside what reads the result: room is made until there is enough, not in between."""
        ended = self._reductions.pop_oldest()
        yield from self._reductions.start_with(ended.wait)
        yield ended.wait
        for bsym in ended.readers:
            yield from self._reductions.start(bsym)


@dataclass(frozen=True, slots=True)
class _Gather:
    bsym: BoundSymbol
    reader: int
    """Which of the operations that compute reads the parameter first."""
    held_until: int
    """Which one begins the last row of operations that all read it; before that it is there but for later ones."""
    wait: int
    """The position of the symbol that waits for it."""
    future: str
    num_bytes: int
    start_bytes: int
    """The most that it takes from its start to its wait."""
    kind: _Kind

    @property
    def num_held_bytes(self) -> int:
        """Those that stay when the operation has run, for a later one."""
        return self.num_bytes if self.held_until > self.reader else 0


def _gathers_in_order(
    symbols: Sequence[BoundSymbol], operations: Mapping[int, int], left: Left
) -> Iterator[_Gather]:
    """Yield the gathers in the order in which they are waited for."""
    starts = {b.output.name: b for b in symbols if is_all_gather(b)}
    readers, num_operations = _readers(symbols, operations), 0
    for position, bsym in enumerate(symbols):
        if is_wait(bsym) and (start := starts.get(bsym.args[0].name)) is not None:
            yield _Gather(
                bsym=start,
                reader=num_operations,
                held_until=_begin_of_last_row(readers.get(start.output.name, ())),
                wait=position,
                future=start.output.name,
                num_bytes=_nbytes(start.output),
                start_bytes=left.start_bytes(start.output.name, _nbytes(start.output)),
                kind=_kind(start),
            )
        num_operations += id(bsym) in operations


def _operations(symbols: Sequence[BoundSymbol]) -> Mapping[int, int]:
    """By their ids, the numbers of the symbols that compute; the others only lead up to one.

    The wait, the cut of padding rows, a transpose, ... come before what reads the parameter.
    """
    computing = (b for b, source in _with_sources(symbols) if source is None)
    return {id(b): number for number, b in enumerate(computing)}


def _readers(
    symbols: Sequence[BoundSymbol], operations: Mapping[int, int]
) -> Mapping[str, Sequence[int]]:
    """By their futures, which operations read the gathered parameters; none for those that are returned."""
    readers = defaultdict[str, list[int]](list)
    source_of: dict[str, str] = {}
    for bsym, source in _with_sources(symbols):
        read = {source_of[a.name] for a in bsym.flat_proxy_args if a.name in source_of}
        if source is not None:
            source_of.update((o.name, source) for o in bsym.flat_proxy_outs)
        elif bsym.sym is prims.python_return:
            readers.update((future, []) for future in read)
        else:
            for future in read:
                readers[future].append(operations[id(bsym)])
    return readers


def _with_sources(
    symbols: Sequence[BoundSymbol],
) -> Iterator[tuple[BoundSymbol, str | None]]:
    """Yield each symbol with the future of the gather that alone decides its results, if there is one."""
    source_of: dict[str, str] = {}
    for bsym in symbols:
        source = bsym.output.name if is_all_gather(bsym) else _only_source(bsym, source_of)
        if source is not None:
            source_of.update((o.name, source) for o in bsym.flat_proxy_outs)
        yield bsym, source


def _only_source(bsym: BoundSymbol, source_of: Mapping[str, str]) -> str | None:
    inputs = [a.name for a in bsym.flat_proxy_args if is_tensor(a)]
    return source_of.get(inputs[0]) if len(inputs) == 1 else None


def _begin_of_last_row(numbers: Sequence[int]) -> int:
    """Of numbers in order, the first of those at the end that follow on each other; 0 of none."""
    begin = 0
    for before, number in pairwise([-2, *numbers]):
        begin = number if number > before + 1 else begin
    return begin


class _Gathers:
    """Gathers that have not started, and those on their way with their bytes."""

    def __init__(
        self, gathers: Sequence[_Gather], left: Left, window_bytes: int, bucket_bytes: int
    ) -> None:
        self._waiting = deque(gathers)
        """From the first that has not started on, with others that have."""
        self._left = left
        self._window_bytes, self._bucket_bytes = window_bytes, bucket_bytes
        self._started: set[str] = set()
        self._in_flight: dict[str, _Gather] = {}
        self._held: list[tuple[int, int]] = []
        """A heap: until which operation, and how many bytes."""
        self._room = window_bytes
        self._next_early: list[_Gather] | None = None
        """What the window alone allows; known until one starts."""

    def reach(self, operation: int) -> None:
        """An operation runs next; what is there for it alone, or for those right after it, is none of the window's."""
        while self._held and self._held[0][0] <= operation:
            self._room += heappop(self._held)[1]

    def start_early(self) -> Iterator[BoundSymbol]:
        """Start what the window has room for: whole buckets, of which two fit into it."""
        limit = min(self._bucket_bytes, self._window_bytes // 2)
        while self._waiting:
            if self._next_early is None:
                self._next_early = self._bucket(limit, ahead_bytes=limit)
            bucket = self._that_fit(self._next_early)
            if not self._fits(bucket) or sum(g.num_bytes for g in bucket) > self._room:
                return
            yield self._start(bucket)

    def start_for(self, future: str) -> Iterator[BoundSymbol]:
        """Start the gather that is waited for now, unless it has, with others as far as the window has room."""
        if future not in self._in_flight:
            first = self._waiting[0]
            assert first.future == future, "gathers start in the order of their waits"
            ahead_bytes = max(0, self._room - first.num_held_bytes)
            bucket = self._bucket(self._bucket_bytes, ahead_bytes=ahead_bytes)
            yield self._start(self._that_fit(bucket))
        gather = self._in_flight.pop(future)
        heappush(self._held, (gather.held_until, gather.num_bytes))

    def _bucket(self, limit: int, *, ahead_bytes: int) -> list[_Gather]:
        """The next gather and small ones after it, of which `ahead_bytes` are for later operations."""
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
        """Its first gathers, as many as there is room for; those that are read now have to start anyway."""
        if self._fits(bucket):
            return bucket
        for num in range(1, len(bucket)):
            is_ahead = bucket[num].reader != bucket[0].reader
            if is_ahead and not self._fits(bucket[: num + 1]):
                return bucket[:num]
        return bucket

    def _fits(self, bucket: Sequence[_Gather]) -> bool:
        num_bytes = sum(_taken(g, bucket) for g in bucket)
        return self._left.fits(num_bytes, max(g.wait for g in bucket))

    def _start(self, bucket: Sequence[_Gather]) -> BoundSymbol:
        for gather in bucket:
            self._left.take(_taken(gather, bucket), gather.wait)
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


def _taken(gather: _Gather, bucket: Sequence[_Gather]) -> int:
    """Several that are joined may be copied on the way."""
    return gather.start_bytes * min(2, len(bucket))


@dataclass(frozen=True, slots=True, eq=False)
class _Postponed:
    wait: BoundSymbol
    num_bytes: int
    start_bytes: int
    """The most that the reduction takes beside what it sends."""
    readers: list[BoundSymbol]
    """What reads the result and nothing else: a cast back, a reduction over further ranks and what follows it."""


class _Reductions:
    """Reductions that have not started because others may join them, and waits that are postponed."""

    def __init__(self, left: Left, window_bytes: int, bucket_bytes: int) -> None:
        self._left, self._window_bytes = left, window_bytes
        self._limit = min(bucket_bytes, window_bytes // 2)
        self._joining: dict[_Kind, list[BoundSymbol]] = {}
        self._kind_of: dict[str, _Kind] = {}
        """By their futures, of those that may be joined."""
        self._joining_bytes: dict[_Kind, int] = {}
        self._sizes: dict[str, int] = {}
        self._started: set[str] = set()
        self._postponed: dict[str, _Postponed] = {}
        """By the future that is waited for, the oldest first."""
        self._postponed_bytes = self._taken_bytes = 0
        self._giver: dict[str, _Postponed] = {}
        """By the names of the values that come only when its wait is over."""

    def start(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        """Start a reduction, or let it wait for others of its kind; all else starts at once."""
        size = _nbytes(bsym.args[0]) if _is_reduction(bsym) else 0
        self._sizes.update((o.name, size) for o in bsym.flat_proxy_outs if size)
        if not 0 < size <= self._limit:
            yield self._started_now(bsym)
            return
        kind = _kind(bsym)
        if kind in self._joining and self._joining_bytes[kind] + size > self._limit:
            yield self._start_joining(kind)
        self._joining.setdefault(kind, []).append(bsym)
        self._joining_bytes[kind] = self._joining_bytes.get(kind, 0) + size
        self._kind_of[bsym.output.name] = kind

    def start_with(self, wait: BoundSymbol) -> Iterator[BoundSymbol]:
        """Start what this waits for, if it has not started."""
        if (kind := self._kind_of.get(wait.args[0].name)) is not None:
            yield self._start_joining(kind)

    def postpone(self, wait: BoundSymbol) -> None:
        future = wait.args[0]
        assert future.name not in self._postponed, "a reduction is waited for once"
        num_bytes = self._sizes.get(future.name, _nbytes(future))
        start_bytes = self._left.start_bytes(future.name, _nbytes(future))
        postponed = _Postponed(wait, num_bytes, start_bytes, [])
        self._postponed[future.name] = postponed
        self._postponed_bytes += num_bytes
        self._taken_bytes += num_bytes + start_bytes
        self._gives(postponed, wait)

    def postponed_with_its_input(self, bsym: BoundSymbol) -> bool:
        """Postpone also what reads nothing but the result of a postponed wait."""
        if not self._giver or bsym.sym is prims.python_return:
            return False
        inputs = {a.name for a in bsym.flat_proxy_args if is_tensor(a)}
        source = self._giver.get(inputs.pop()) if len(inputs) == 1 else None
        if source is None:
            return False
        source.readers.append(bsym)
        self._gives(source, bsym)
        return True

    def _gives(self, postponed: _Postponed, bsym: BoundSymbol) -> None:
        for result in bsym.flat_proxy_outs:
            self._giver.setdefault(result.name, postponed)

    @property
    def are_overdue(self) -> bool:
        """Whether more than the window is on its way."""
        return self._postponed_bytes > self._window_bytes

    @property
    def take_too_much(self) -> bool:
        """Whether what is on its way leaves too little for what runs now."""
        return bool(self._postponed) and self._taken_bytes > self._left.now

    def give_input_to(self, bsym: BoundSymbol) -> bool:
        """Whether this symbol reads something that is postponed."""
        return bool(self._giver) and any(a.name in self._giver for a in bsym.flat_proxy_args)

    def pop_oldest(self) -> _Postponed:
        """The oldest that is on its way; those that others may still join come last."""
        on_their_way = (future for future in self._postponed if future in self._started)
        oldest = self._postponed.pop(next(on_their_way, next(iter(self._postponed))))
        self._postponed_bytes -= oldest.num_bytes
        self._taken_bytes -= oldest.num_bytes + oldest.start_bytes
        for bsym in (oldest.wait, *oldest.readers):
            for result in bsym.flat_proxy_outs:
                self._giver.pop(result.name, None)
        return oldest

    def _start_joining(self, kind: _Kind) -> BoundSymbol:
        symbols = self._joining.pop(kind)
        del self._joining_bytes[kind]
        for bsym in symbols:
            del self._kind_of[bsym.output.name]
        return self._started_now(symbols[0] if len(symbols) == 1 else _reduction_bucket(symbols))

    def _started_now(self, bsym: BoundSymbol) -> BoundSymbol:
        self._started.update(o.name for o in bsym.flat_proxy_outs)
        return bsym


def _is_reduction(bsym: BoundSymbol) -> bool:
    return is_reduce_scatter(bsym) or is_all_reduce(bsym)


def _largest_reduction(symbols: Sequence[BoundSymbol]) -> int:
    return max((_nbytes(b.args[0]) for b in symbols if _is_reduction(b)), default=0)


def _reduction_bucket(symbols: Sequence[BoundSymbol]) -> BoundSymbol:
    first, values = symbols[0], [b.args[0] for b in symbols]
    output = tuple(b.output for b in symbols)
    if is_reduce_scatter(first):
        return reduce_scatter_bucket.bind(values, first.args[2], output=output)
    return all_reduce_bucket.bind(values, first.args[2], reduces_in_place(first), output=output)


def _kind(bsym: BoundSymbol) -> _Kind:
    """Gathers, or reductions, of one kind can be one collective."""
    sums = is_all_reduce(bsym) and ("in place" if reduces_in_place(bsym) else "in a copy")
    group = bsym.args[2 if _is_reduction(bsym) else 1]
    return sums, bsym.output.dtype, bsym.output.device, id(group)


def _nbytes(tensor: TensorProxy | FutureTensorProxy) -> int:
    return int(tensor.numel) * int(tensor.dtype.bytes)
