"""Joins small reductions, and postpones the waits for them as far as the window allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thunder.core import prims
from thunder.core.symbol import BoundSymbol

from thunder_memsave.ops.families.collectives import (
    all_reduce_bucket,
    is_reduce_scatter,
    reduce_scatter_bucket,
)
from thunder_memsave.passes.overlap.facts import Kind, is_reduction, kind_of, nbytes_of
from thunder_memsave.passes.overlap.room import BudgetLeft
from thunder_memsave.passes.symbols import is_tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Postponed:
    wait: BoundSymbol
    num_bytes: int
    start_bytes: int
    """Peak bytes of the reduction beside its input."""
    readers: list[BoundSymbol]
    """Symbols that read only the result: a cast back, a reduction over further ranks and what follows it."""


class Reductions:
    """The reductions held back so that others may join them, and the postponed waits."""

    def __init__(self, left: BudgetLeft, window_bytes: int, bucket_bytes: int) -> None:
        self._left, self._window_bytes = left, window_bytes
        self._limit = min(bucket_bytes, window_bytes // 2)
        self._joining: dict[Kind, list[BoundSymbol]] = {}
        self._kind_of: dict[str, Kind] = {}
        """Kinds of the reductions that others may still join, by future."""
        self._joining_bytes: dict[Kind, int] = {}
        self._sizes: dict[str, int] = {}
        self._started: set[str] = set()
        self._postponed: dict[str, _Postponed] = {}
        """Postponed waits by their futures, the oldest first."""
        self._postponed_bytes = self._taken_bytes = 0
        self._giver: dict[str, _Postponed] = {}
        """The postponed wait that each value depends on, by the value's name."""

    def start(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        """Start a symbol at once, or hold a small reduction back for others of its kind."""
        size = nbytes_of(bsym.args[0]) if is_reduction(bsym) else 0
        self._sizes.update((o.name, size) for o in bsym.flat_proxy_outs if size)
        if not 0 < size <= self._limit:
            yield self._started_now(bsym)
            return
        kind = kind_of(bsym)
        if kind in self._joining and self._joining_bytes[kind] + size > self._limit:
            yield self._start_joining(kind)
        self._joining.setdefault(kind, []).append(bsym)
        self._joining_bytes[kind] = self._joining_bytes.get(kind, 0) + size
        self._kind_of[bsym.output.name] = kind

    def start_with(self, wait: BoundSymbol) -> Iterator[BoundSymbol]:
        """Start the reduction that this symbol waits for, if it has not started."""
        if (kind := self._kind_of.get(wait.args[0].name)) is not None:
            yield self._start_joining(kind)

    def postpone(self, wait: BoundSymbol) -> None:
        """Postpone the wait for a reduction."""
        future = wait.args[0]
        assert future.name not in self._postponed, "a reduction is waited for once"
        num_bytes = self._sizes.get(future.name, nbytes_of(future))
        start_bytes = self._left.start_bytes(future.name, nbytes_of(future))
        postponed = _Postponed(wait, num_bytes, start_bytes, [])
        self._postponed[future.name] = postponed
        self._postponed_bytes += num_bytes
        self._taken_bytes += num_bytes + start_bytes
        self._gives(postponed, wait)

    def postponed_with_its_input(self, bsym: BoundSymbol) -> bool:
        """Postpone a symbol that reads only the result of a postponed wait; return whether it does."""
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
        """Whether more bytes are in flight than the window has."""
        return self._postponed_bytes > self._window_bytes

    @property
    def take_too_much(self) -> bool:
        """Whether the reductions in flight exceed the room of the symbol that runs now."""
        return bool(self._postponed) and self._taken_bytes > self._left.now

    def give_input_to(self, bsym: BoundSymbol) -> bool:
        """Return whether this symbol reads a postponed value."""
        return bool(self._giver) and any(a.name in self._giver for a in bsym.flat_proxy_args)

    def pop_oldest(self) -> _Postponed:
        """Remove and return the oldest one in flight; those that others may still join come last."""
        in_flight = (future for future in self._postponed if future in self._started)
        oldest = self._postponed.pop(next(in_flight, next(iter(self._postponed))))
        self._postponed_bytes -= oldest.num_bytes
        self._taken_bytes -= oldest.num_bytes + oldest.start_bytes
        for bsym in (oldest.wait, *oldest.readers):
            for result in bsym.flat_proxy_outs:
                self._giver.pop(result.name, None)
        return oldest

    def _start_joining(self, kind: Kind) -> BoundSymbol:
        symbols = self._joining.pop(kind)
        del self._joining_bytes[kind]
        for bsym in symbols:
            del self._kind_of[bsym.output.name]
        return self._started_now(symbols[0] if len(symbols) == 1 else _reduction_bucket(symbols))

    def _started_now(self, bsym: BoundSymbol) -> BoundSymbol:
        self._started.update(o.name for o in bsym.flat_proxy_outs)
        return bsym


def _reduction_bucket(symbols: Sequence[BoundSymbol]) -> BoundSymbol:
    first, values = symbols[0], [b.args[0] for b in symbols]
    bucket = reduce_scatter_bucket if is_reduce_scatter(first) else all_reduce_bucket
    return bucket.bind(values, *first.args[1:], output=tuple(b.output for b in symbols))
