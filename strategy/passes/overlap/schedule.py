"""Schedule: overlaps collectives with computation, within a window of bytes.

Each gather starts before the operation that needs it, as early as the window allows; each reduction is waited for as
late as the window allows. Before:

    ft1 = all_gather_rows(w1, group, torch.float32)
    t1 = torch_wait_prim_impl(ft1)
    t5 = torch.nn.functional.linear(x, t1, None)
    ft2 = all_gather_rows(w2, group, torch.float32)
    t2 = torch_wait_prim_impl(ft2)
    t6 = torch.nn.functional.linear(t5, t2, None)

After, with a window of at least w2's bytes:

    ft1 = all_gather_rows(w1, group, torch.float32)
    t1 = torch_wait_prim_impl(ft1)
    ft2 = all_gather_rows(w2, group, torch.float32)    # in flight while linear runs
    t5 = torch.nn.functional.linear(x, t1, None)
    t2 = torch_wait_prim_impl(ft2)
    t6 = torch.nn.functional.linear(t5, t2, None)

Small parameters share a collective, and so do small gradients:

    (ft1, ft2) = all_gather_bucket([w1, w2], group, torch.float32)

While an operation runs, the gathered parameters in flight, or held for later operations, are at most `window_bytes`,
and the unreduced whole gradients in flight at most half of that. A parameter that was read and will be read again, as
by a clone (`recompute`), counts against the window; the plan alone decides on those, so nothing else is in flight where
they exceed the window. With a window of 0 only parameters that one operation reads are joined. Every rank has the same
trace, so all start their collectives in the same order.

If a budget leaves less than the window (`room.py`), less is in flight: a gather starts as soon as it fits at every
operation up to its reader, and the oldest reduction is waited for when an operation needs the room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from thunder.core.proxies import FutureTensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from torch import nn

from thunder_memsave.ops.families.collectives import (
    gathers,
    is_all_gather,
    is_wait,
)
from thunder_memsave.passes.overlap.facts import largest_reduction, operations_of
from thunder_memsave.passes.overlap.gathers import (
    Gathers,
    casts_of_shards,
    gathers_in_order,
)
from thunder_memsave.passes.overlap.reductions import Reductions
from thunder_memsave.passes.overlap.room import BudgetLeft, Room
from thunder_memsave.passes.overlap.shard_fetches import ShardFetches, fetches_of_shards
from thunder_memsave.sharding.rows import whole_shape


def schedule(
    trace: TraceCtx, *, window_bytes: int, bucket_bytes: int = 0, room: Room | None = None
) -> TraceCtx:
    """Move collectives and their waits, and join small collectives; change nothing else.

    Args:
        trace: A forward, backward or inference trace, before values are deleted after their last use.
        window_bytes: Limit on the whole parameters in flight; half of it limits whole gradients; 0 overlaps nothing.
        bucket_bytes: The largest shared collective, and the largest parameter or gradient in one; 0: none is shared.
        room: A further limit to both, the same on all ranks; None: no limit.

    Returns:
        A trace with the same symbols reordered, except for the joined collectives.
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
    """Return twice the unsharded bytes of the largest repeated block: one that is read, one in flight.

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


def _read_by_casts(symbols: Sequence[BoundSymbol], casts: Set[int]) -> set[str]:
    """Return the names of values that casts of shards read and that no cast, but another symbol, makes."""
    read = {a.name for b in symbols if id(b) in casts for a in b.flat_proxy_args}
    others = (b for b in symbols if id(b) not in casts and not b.sym.name.startswith("unpack"))
    return read & {o.name for b in others for o in b.flat_proxy_outs}


class _Schedule:
    """Emits the symbols in order, each after the collectives that are due before it."""

    def __init__(
        self,
        symbols: Sequence[BoundSymbol],
        window_bytes: int,
        bucket_bytes: int,
        room: Room | None,
    ) -> None:
        self._symbols = symbols
        self._left = BudgetLeft(room, symbols, for_others_bytes=largest_reduction(symbols))
        futures = {
            o.name for b in symbols for o in b.flat_proxy_outs if isinstance(o, FutureTensorProxy)
        }
        self._operations = operations_of(symbols)
        self._casts = casts_of_shards(symbols)
        fetched = fetches_of_shards(self._casts)
        in_order = list(gathers_in_order(symbols, self._operations, self._left, leave_out=fetched))
        self._gathered = {g.future for g in in_order}
        self._fetches = ShardFetches(symbols, self._casts, self._left, window_bytes)
        self._are_casts = {id(b) for casts in self._casts.values() for b in casts}
        self._awaited = _read_by_casts(symbols, self._are_casts)
        """Values that casts of shards read and that are still to come: no gather starts early before them."""
        self._reduced = futures - self._gathered - fetched
        to_come = self._fetches.bytes_to_come
        self._gathers = Gathers(in_order, self._left, window_bytes, bucket_bytes, to_come)
        # A gradient in flight takes twice its bytes: what is sent, and what is received.
        self._reductions = Reductions(self._left, window_bytes // 2, bucket_bytes)

    def reordered(self) -> Iterator[BoundSymbol]:
        """Yield the symbols; what makes a shard that is gathered comes right before the first gather of it."""
        made: set[int] = set()
        for bsym in self._ordered():
            for shard, _ in gathers(bsym):
                # A cast may make two shards: numbers and their scales.
                casts = [b for b in self._casts.get(shard.name, ()) if id(b) not in made]
                made.update(map(id, casts))
                self._fetches.reach(shard.name)
                yield from casts
            made.add(id(bsym))  # a fetch that began early
            yield bsym

    def _ordered(self) -> Iterator[BoundSymbol]:
        for position, bsym in enumerate(self._symbols):
            self._left.reach(position)
            if not self._ends_reduction(bsym):  # a wait frees what was sent
                yield from self._make_room()
            yield from self._place(bsym)
            self._awaited -= {o.name for o in bsym.flat_proxy_outs}

    def _make_room(self) -> Iterator[BoundSymbol]:
        while self._reductions.take_too_much:
            yield from self._end_oldest()

    def _ends_reduction(self, bsym: BoundSymbol) -> bool:
        return is_wait(bsym) and bsym.args[0].name in self._reduced

    def _place(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        future = bsym.args[0].name if is_wait(bsym) else None
        if is_all_gather(bsym) and bsym.output.name in self._gathered:
            return  # starts when the window has room, at the latest right before its wait
        if id(bsym) in self._are_casts:
            return
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
        starts = [] if self._awaited else list(self._gathers.start_early())
        yield from self._make_room()
        yield from starts
        if not self._awaited:
            yield from self._fetches.begin_early()

    def _end_oldest(self) -> Iterator[BoundSymbol]:
        """Yield the oldest wait and its readers. No gather starts in between: first enough room is made."""
        ended = self._reductions.pop_oldest()
        yield from self._reductions.start_with(ended.wait)
        yield ended.wait
        for bsym in ended.readers:
            yield from self._reductions.start(bsym)
