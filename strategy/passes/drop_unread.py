"""Drops operations that nothing reads: Thunder's `dce`, in time that grows with the trace.

Thunder's looks through all parts of an operation for each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from thunder.core.baseutils import NumberProxyInterface
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import remove_duplicate_number_proxies
from thunder.transforms import autodiff

_MAKES_NOTHING = (PrimIDs.COMMENT, PrimIDs.PRINT, PrimIDs.RETURN)


def drop_unread(trace: TraceCtx) -> TraceCtx:
    """Return the trace without operations of which no result is read, nor of kept ones the parts that do nothing.

    Before, of which only `b` is returned:

        a = cos(x)
        b = sin(x)

    After:

        b = sin(x)
    """
    made_by = _producers(trace.bound_symbols)
    needed = {o.name for o in tree_flatten(trace.output)[0] if isinstance(o, Proxy)}
    kept: list[BoundSymbol] = []
    for bsym in reversed(trace.bound_symbols):
        made = (o.name for o in bsym.flat_proxy_outs if o.name in needed)
        if not (any(made_by[name] == bsym for name in made) or _always_stays(bsym)):
            continue
        _drop_idle_parts(bsym)
        kept.append(bsym)
        needed.update(a.name for a in bsym.flat_proxy_args)
    new = from_trace(trace)
    new.bound_symbols = list(_with_numbers_once(kept[::-1]))
    new.set_provenance(TraceProvenance("Drop unread"))
    return new


@contextmanager
def instead_of_thunders() -> Iterator[None]:
    """Let Thunder's transforms for derivatives drop with `drop_unread`, too, what nothing reads."""
    with patch.object(autodiff, "dce", drop_unread):
        yield


def _producers(symbols: Iterable[BoundSymbol]) -> dict[str, BoundSymbol]:
    """Return the first operation that makes each value, by the value's name."""
    made_by: dict[str, BoundSymbol] = {}
    for bsym in symbols:
        if bsym.sym.id in _MAKES_NOTHING:
            continue
        given = {a.name for a in bsym.flat_proxy_args}
        for output in bsym.flat_proxy_outs:
            if output.name not in given:
                made_by.setdefault(output.name, bsym)
    return made_by


def _always_stays(bsym: BoundSymbol) -> bool:
    """Return whether an operation, or a part of it, has an effect besides its results."""
    tags = bsym.sym.tags
    if OpTags.DONT_DCE in bsym.tags or (tags is not None and OpTags.DONT_DCE in tags):
        return True
    return any(map(_always_stays, bsym.subsymbols))


def _drop_idle_parts(bsym: BoundSymbol) -> None:
    """Take out of an operation, in place, its parts that do nothing: rules look for what it is made of."""
    if not bsym.subsymbols:
        return
    keeps_all = _always_stays(bsym)
    parts = []
    for part in bsym.subsymbols:
        if not part.subsymbols and not part.sym.is_prim:
            continue
        if keeps_all or part.flat_proxy_outs:
            _drop_idle_parts(part)
            parts.append(part)
    bsym.subsymbols = parts


def _with_numbers_once(symbols: list[BoundSymbol]) -> Iterator[BoundSymbol]:
    """Yield the operations that have results, each symbolic number being made once: none is where shapes are fixed."""
    if any(isinstance(o, NumberProxyInterface) for b in symbols for o in b.flat_outs):
        symbols = remove_duplicate_number_proxies(symbols)
    yield from (b for b in symbols if b.flat_outs)
