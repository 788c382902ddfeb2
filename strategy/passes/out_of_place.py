"""Removes in-place writes to forward's own values, so that recomputed operations find the values that they read.

Thunder computes an in-place operation out of place and copies the result back. Before:

    t1 = torch.nn.functional.linear(x, w, None)
    (t2,) = update_aliases((t1,))                   # t1 itself
    t3 = torch.add(t2, x)
    t4 = copy_(t3, t2)
    t5 = torch.sin(t4)

After:

    t1 = torch.nn.functional.linear(x, w, None)
    t3 = torch.add(t1, x)
    t5 = torch.sin(t3)

So every operation between `t1` and `t5` can be recomputed, backward reads `t1` without a saved copy, and one copy
is saved. A write stays if its removal could be observed: its target is an argument, another view of the target is
read later, the source is also returned to the caller, or the source has other strides, so that the bits of later sums
could differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

from thunder_memsave.measure.layouts import Layout, Value
from thunder_memsave.passes.symbols import (
    forward_symbols,
    is_joint,
    renamed,
    written_in_place,
)


@dataclass(frozen=True, slots=True)
class TraceMemory:
    """Storages of the tensors of a trace."""

    values: Mapping[str, Value]
    """Storage and layout of each tensor, by name."""
    inputs: Set[int]
    """Storages of the arguments."""


def out_of_place(trace: TraceCtx, *, memory: Callable[[TraceCtx], TraceMemory]) -> TraceCtx:
    """Drop copies in place where their readers can read the source instead.

    Args:
        trace: A joint trace, with operations claimed by executors; an inference trace is returned unchanged.
        memory: Finds the storages of a trace; called only if the trace writes in place.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols) or not any(written_in_place(b) is not None for b in symbols):
        return trace
    found = memory(trace)
    same = _Same(symbols)
    dropped = _droppable(symbols, found, same)
    if not dropped:
        return trace
    left = {found.values[w.target].storage for w in _writes(symbols) if id(w.symbol) not in dropped}
    new = from_trace(trace)
    new.bound_symbols = list(_rewritten(symbols, found, dropped, left))
    new.set_provenance(TraceProvenance("Joint pass out_of_place"))
    return new


@dataclass(frozen=True, slots=True)
class _Write:
    """`result = copy_(source, target)`."""

    symbol: BoundSymbol
    position: int

    @property
    def source(self) -> str:
        return str(self.symbol.args[0].name)

    @property
    def target(self) -> str:
        return str(self.symbol.args[1].name)


def _writes(symbols: Sequence[BoundSymbol]) -> Iterator[_Write]:
    for position, bsym in enumerate(symbols):
        if written_in_place(bsym) is not None:
            yield _Write(bsym, position)


class _Same:
    """The readers of each value of forward, under all names that `update_aliases` gives it."""

    def __init__(self, symbols: Sequence[BoundSymbol]) -> None:
        forward = forward_symbols(symbols)
        self.forward = forward
        self.returned = _returned(symbols)
        self.read = {a.name for b in symbols for a in b.flat_proxy_args}
        self._last: dict[str, int] = dict.fromkeys(self.returned, len(symbols))
        for position in range(len(symbols) - 1, -1, -1):
            bsym = symbols[position]
            if id(bsym) not in forward:
                continue
            if _updates_aliases(bsym):
                for before, after in _pairs(bsym):
                    self._read_by(before.name, self._last.get(after.name, -1))
            else:
                for a in bsym.flat_proxy_args:
                    self._read_by(a.name, position)

    def _read_by(self, name: str, position: int) -> None:
        self._last[name] = max(self._last.get(name, -1), position)

    def is_read_after(self, name: str, position: int) -> bool:
        """Return whether forward reads the value after `position`, or returns it."""
        return self._last.get(name, -1) > position


def _returned(symbols: Sequence[BoundSymbol]) -> set[str]:
    return {o.name for o in symbols[-1].args[0]["fw_flat_out"] if isinstance(o, Proxy)}


def _updates_aliases(bsym: BoundSymbol) -> bool:
    return str(bsym.sym.name) == "update_aliases"


def _pairs(bsym: BoundSymbol) -> Iterator[tuple[Proxy, Proxy]]:
    return zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=True)


def _droppable(symbols: Sequence[BoundSymbol], memory: TraceMemory, same: _Same) -> set[int]:
    """Return the ids of the writes that can go: none that would merge a storage into one that is still written to."""
    writes = [w for w in _writes(symbols) if id(w.symbol) in same.forward or _is_read(w, same)]
    made_at = {o.name: n for n, b in enumerate(symbols) for o in b.flat_proxy_outs}
    names: dict[int, list[str]] = defaultdict(list)
    for name, value in memory.values.items():
        names[value.storage].append(name)
    dropped = [w for w in writes if _is_unnoticed(w, memory, same, names, made_at)]
    while True:
        staying = [w for w in writes if w not in dropped]
        shared = _shared(memory.values, dropped)
        written = {shared.get(s, s) for w in staying for s in [memory.values[w.target].storage]}
        kept = [w for w in dropped if shared[memory.values[w.target].storage] not in written]
        if kept == dropped:
            return {id(w.symbol) for w in dropped}
        dropped = kept


def _is_read(write: _Write, same: _Same) -> bool:
    """Return whether the result is read; `keep_overwritten` drops unread writes outside of forward."""
    return any(o.name in same.read for o in write.symbol.flat_proxy_outs)


def _is_unnoticed(
    write: _Write,
    memory: TraceMemory,
    same: _Same,
    names: Mapping[int, Sequence[str]],
    made_at: Mapping[str, int],
) -> bool:
    source, target = memory.values[write.source], memory.values[write.target]
    if id(write.symbol) not in same.forward or source.storage == target.storage:
        return False
    if {source.storage, target.storage} & memory.inputs:
        return False
    if not _is_laid_out_alike(source.layout, target.layout):
        return False
    if any(name in same.returned for name in names[source.storage]):
        return False
    return not any(
        made_at[name] < write.position and same.is_read_after(name, write.position)
        for name in names[target.storage]
    )


def _is_laid_out_alike(ours: Layout, other: Layout) -> bool:
    strides = zip(ours.shape, ours.stride, other.stride, strict=True)
    return ours.dtype == other.dtype and all(a == b for n, a, b in strides if n != 1)


def _shared(values: Mapping[str, Value], dropped: Sequence[_Write]) -> dict[int, int]:
    """Map each storage to one number for all storages that become one without these writes."""
    number: dict[int, int] = {}
    for write in dropped:
        source, target = values[write.source].storage, values[write.target].storage
        one, other = number.setdefault(source, source), number.setdefault(target, target)
        number.update((s, one) for s, n in list(number.items()) if n == other)
    return number


def _rewritten(
    symbols: Sequence[BoundSymbol], memory: TraceMemory, dropped: Set[int], left: Set[int]
) -> Iterator[BoundSymbol]:
    """Yield the remaining symbols; aliases of storages that are no longer written to become the values themselves."""
    called: dict[str, Proxy] = {}
    for bsym in symbols:
        if id(bsym) in dropped:
            source = bsym.args[0]
            called[bsym.output.name] = called.get(source.name, source)
        elif _updates_aliases(bsym) and not _storages(bsym, memory) & (left | memory.inputs):
            called.update((after.name, called.get(p.name, p)) for p, after in _pairs(bsym))
        elif any(a.name in called for a in bsym.flat_proxy_args) or _returns(bsym):
            yield renamed(bsym, called, skip_output=True)
        else:
            yield bsym


def _storages(bsym: BoundSymbol, memory: TraceMemory) -> set[int]:
    tensors = (a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy))
    return {memory.values[a.name].storage for a in tensors}


def _returns(bsym: BoundSymbol) -> bool:
    return bsym.sym is prims.python_return
