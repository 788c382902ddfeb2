"""Offload: values that forward saves go to the host in forward, and come back before backward first reads them.

Before, with the storage of `t1` on the host:

    t1 = torch.nn.functional.gelu(t0)
    t2 = torch.matmul(t1, w)
    return t2, (t1, w)                              # backward: t1, w = C0

After:

    t1 = torch.nn.functional.gelu(t0)
    t1_host = copy_out(t1)                          # once its last write is done
    t2 = torch.matmul(t1, w)
    t1_away = wait_copy_out(t1_host)                # t1's memory is freed here
    return t2, (t1_away, w)                         # backward: t1_away, w = C0
    ...
    t1_back = copy_in(t1_away, "cpu")
    t1, = wait_copy_in(t1_back, ...)                # before its first reader
    t8 = torch.matmul(g, t1)

It comes after all passes that move operations, so the order of copies is final. Names that share a storage come back
together, as views of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, tracectx

from thunder_memsave.ops.host_copies.symbols import (
    LaidOut,
    bytes_proxy,
    copy_in,
    copy_out,
    wait_copy_in,
    wait_copy_out,
)
from thunder_memsave.passes.symbols import emptied

_NOWHERE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloaded:
    """A storage of forward that goes to the host. Positions are indices of the symbols of forward."""

    value: str
    """Name of a value in it, as which it is copied."""
    saved: tuple[str, ...]
    """Names of the values in it that backward reads."""
    layouts: tuple[LaidOut, ...]
    """Those of `saved`."""
    nbytes: int
    place: str
    """Its device."""
    final: int
    """The last symbol that makes or writes it."""
    last_read: int
    """The last symbol that reads or makes it."""

    @property
    def host(self) -> str:
        """Name of the buffer while the copy out runs."""
        return f"{self.value}_host"

    @property
    def away(self) -> str:
        """Name of the buffer that is saved for backward."""
        return f"{self.value}_away"

    @property
    def back(self) -> str:
        """Name of the bytes that are copied back."""
        return f"{self.value}_back"


def offload_forward(
    forward: TraceCtx, storages: Sequence[Offloaded], waits: Mapping[str, int] = _NOWHERE
) -> TraceCtx:
    """Copy storages out in forward, and save buffers of the host in their stead.

    Args:
        forward: A forward that returns what it saves, before values are deleted after their last use.
        storages: Those that go to the host.
        waits: By the names of buffers, the index of the symbol before which to wait for the copy; others are waited
            for where forward is done with the value.
    """
    new, inserted = emptied(forward), _Inserted()
    produced = {o.name: o for b in forward.bound_symbols for o in b.flat_proxy_outs}
    with tracectx(new):
        for each in storages:
            host, away = (bytes_proxy(n, each.nbytes, "cpu") for n in (each.host, each.away))
            inserted.before(each.final + 1, copy_out.bind(produced[each.value], output=host))
            wait = wait_copy_out.bind(host, output=away)
            done = max(each.final, each.last_read) + 1
            inserted.before(waits.get(each.host, done), wait)
        buffers = {s: each.away for each in storages for s in each.saved}
        returned = _saving(forward.bound_symbols[-1], buffers, inserted.made)
    new.bound_symbols = [*inserted.among(forward.bound_symbols[:-1]), returned]
    new.set_provenance(TraceProvenance("Pass offload"))
    return new


def offload_backward(
    backward: TraceCtx, storages: Sequence[Offloaded], starts: Mapping[str, int] = _NOWHERE
) -> TraceCtx:
    """Copy storages back in a backward, each as a whole, before the first symbol that reads any of its values.

    Args:
        backward: A backward of that forward, before values are deleted after their last use.
        storages: Those that forward has sent to the host.
        starts: By the names of the bytes that come back, the index of the symbol before which to begin; others begin
            right before their first reader.
    """
    new, inserted = emptied(backward), _Inserted()
    symbols = list(backward.bound_symbols)
    unpack, number = _unpacking(symbols, storages)
    proxies = {p.name: p for p in unpack.flat_proxy_outs}
    first_readers = _first_readers(symbols)
    with tracectx(new):
        for each in storages:
            away = bytes_proxy(each.away, each.nbytes, "cpu")
            proxies[each.away] = away
            saved = [proxies[name] for name in each.saved if name in proxies]
            readers = [first_readers[p.name] for p in saved if p.name in first_readers]
            if not readers:
                continue
            first = min(readers)
            back = bytes_proxy(each.back, each.nbytes, each.place)
            begin = copy_in.bind(away, each.place, output=back)
            inserted.before(min(starts.get(each.back, first), first), begin)
            layouts = tuple(
                layout
                for name, layout in zip(each.saved, each.layouts, strict=True)
                if name in proxies
            )
            inserted.before(first, wait_copy_in.bind(back, layouts, output=tuple(saved)))
        symbols[number] = _unpacking_buffers(unpack, storages, proxies)
    new.bound_symbols = list(inserted.among(symbols))
    new.set_provenance(TraceProvenance("Pass offload"))
    return new


@dataclass(slots=True)
class _Inserted:
    """Symbols to insert, by the index of the symbol before which they come."""

    _at: dict[int, list[BoundSymbol]] = field(default_factory=dict)
    made: dict[str, Proxy] = field(default_factory=dict)
    """Proxies that they make."""

    def before(self, index: int, bsym: BoundSymbol) -> None:
        self._at.setdefault(index, []).append(bsym)
        self.made.update((o.name, o) for o in bsym.flat_proxy_outs)

    def among(self, symbols: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
        """Yield all symbols, of those at one place the beginnings before the waits."""
        for index, bsym in enumerate((*symbols, None)):
            yield from sorted(self._at.get(index, ()), key=_is_wait)
            if bsym is not None:
                yield bsym


def _is_wait(bsym: BoundSymbol) -> bool:
    return bsym.sym.id in (wait_copy_out.id, wait_copy_in.id)


def _saving(
    bsym: BoundSymbol, buffers: Mapping[str, str], made: Mapping[str, Proxy]
) -> BoundSymbol:
    """Return forward's `return` with buffers in place of what is in them, each once."""
    result, (tensors, others) = bsym.args
    return bsym.from_bsym(args=(result, (_replaced(tensors, buffers, made), others)))


def _replaced(
    saved: Sequence[TensorProxy], buffers: Mapping[str, str], made: Mapping[str, Proxy]
) -> tuple[Proxy, ...]:
    names = dict.fromkeys(buffers.get(t.name, t.name) for t in saved)
    known = {**{t.name: t for t in saved}, **made}
    return tuple(known[name] for name in names)


def _unpacking(
    symbols: Sequence[BoundSymbol], storages: Sequence[Offloaded]
) -> tuple[BoundSymbol, int]:
    """Find the symbol that unpacks what forward saved, and its index."""
    names = {name for each in storages for name in each.saved}
    for number, bsym in enumerate(symbols):
        is_unpacking = bsym.sym.id is prims.PrimIDs.UNPACK_SEQUENCE
        if is_unpacking and any(o.name in names for o in bsym.flat_proxy_outs):
            return bsym, number
    raise AssertionError("backward unpacks what forward has saved")


def _unpacking_buffers(
    bsym: BoundSymbol, storages: Sequence[Offloaded], proxies: Mapping[str, Proxy]
) -> BoundSymbol:
    buffers = {s: each.away for each in storages for s in each.saved}
    output = list(_replaced(bsym.output, buffers, proxies))
    return bsym.from_bsym(args=(bsym.args[0], len(output)), output=output)


def _first_readers(symbols: Sequence[BoundSymbol]) -> dict[str, int]:
    """Return the index of the first symbol that reads a value, by its name."""
    found: dict[str, int] = {}
    for number, bsym in enumerate(symbols):
        for read in bsym.flat_proxy_args:
            found.setdefault(read.name, number)
    return found
