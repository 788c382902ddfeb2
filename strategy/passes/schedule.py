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

While an operation runs, the gathered parameters on their way are at most `window_bytes`, and so are the whole gradients
that wait for their reduction. Every rank has the same trace, so all start their collectives in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from torch import nn

from thunder_memsave import compat

compat.apply()

from thunder.core.proxies import FutureTensorProxy, TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace  # noqa: E402

from thunder_memsave.collectives import is_all_gather, is_wait  # noqa: E402
from thunder_memsave.sharding import whole_shape  # noqa: E402


def schedule(trace: TraceCtx, *, window_bytes: int) -> TraceCtx:
    """Move collectives and the waits for them; nothing else.

    Args:
        trace: A forward, backward or inference trace, before values are deleted after their last use.
        window_bytes: Whole parameters on their way, and whole gradients on theirs; 0 overlaps nothing.

    Returns:
        A trace with the same symbols in another order.
    """
    if not any(is_wait(b) for b in trace.bound_symbols):
        return trace
    new = from_trace(trace)
    new.bound_symbols = list(_reordered(trace.bound_symbols, window_bytes))
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


class _InFlight:
    """Collectives on their way, oldest first."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._queue: deque[tuple[BoundSymbol, int]] = deque()

    def has_room_for(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._window_bytes

    def add(self, bsym: BoundSymbol, num_bytes: int) -> None:
        self._queue.append((bsym, num_bytes))

    def pop_until(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        """Take out the oldest ones up to this one, if it is there."""
        if any(b is bsym for b, _ in self._queue):
            popped = None
            while popped is not bsym:
                popped, _ = self._queue.popleft()
                yield popped

    def pop_overdue(self) -> Iterator[BoundSymbol]:
        """Take out the oldest ones until the rest fits into the window."""
        while self._num_bytes > self._window_bytes:
            yield self._queue.popleft()[0]

    def __iter__(self) -> Iterator[BoundSymbol]:
        return (bsym for bsym, _ in self._queue)

    @property
    def _num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._queue)


def _reordered(symbols: Sequence[BoundSymbol], window_bytes: int) -> Iterator[BoundSymbol]:
    starters = {o.name: b for b in symbols for o in b.flat_proxy_outs if _is_future(o)}
    waits = {id(b): starters[b.args[0].name] for b in symbols if is_wait(b)}
    waiting = deque(start for start in waits.values() if is_all_gather(start))
    missing = {o.name for b in symbols for o in b.flat_proxy_outs}
    gathers, reductions = _InFlight(window_bytes), _InFlight(window_bytes)
    for bsym in symbols:
        if is_all_gather(bsym):
            continue  # it starts when the window has room, at the latest right before its wait
        if (start := waits.get(id(bsym))) is None:
            yield from _waits_for_inputs(bsym, reductions)
            while waiting and _can_start(waiting[0], gathers, missing):
                gathers.add(waiting[0], _whole(waiting[0]))
                yield waiting.popleft()
            yield bsym
        elif is_all_gather(start):
            if waiting and waiting[0] is start:
                yield waiting.popleft()
            list(gathers.pop_until(start))
            yield bsym
        else:
            reductions.add(bsym, _nbytes(start.args[0]))
            yield from reductions.pop_overdue()
        missing.difference_update(o.name for o in bsym.flat_proxy_outs)


def _can_start(gather: BoundSymbol, in_flight: _InFlight, missing: set[str]) -> bool:
    return gather.args[0].name not in missing and in_flight.has_room_for(_whole(gather))


def _waits_for_inputs(bsym: BoundSymbol, reductions: _InFlight) -> Iterator[BoundSymbol]:
    """Yield the postponed waits whose results this symbol reads, and those before them."""
    names = {a.name for a in bsym.flat_proxy_args}
    read = [w for w in reductions if any(o.name in names for o in w.flat_proxy_outs)]
    for wait in read:
        yield from reductions.pop_until(wait)


def _whole(gather: BoundSymbol) -> int:
    return _nbytes(gather.flat_proxy_outs[0])


def _nbytes(tensor: TensorProxy | FutureTensorProxy) -> int:
    return int(tensor.numel) * int(tensor.dtype.bytes)


def _is_future(proxy: object) -> bool:
    return isinstance(proxy, FutureTensorProxy)
