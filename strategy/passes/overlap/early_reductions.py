"""Starts each reduction as soon as its gradient is there, where the trace has all of them at the end.

One rule of differentiation for a whole graph (`frontend/lowering.py`) gives the gradients of all weights together,
so that Thunder records every reduction after all else:

    g2 = mm(...)                        g2 = mm(...)
    g1 = mm(...)                        f2 = reduce_scatter(g2); t2 = wait(f2)
    f2 = reduce_scatter(g2); ...   ->   g1 = mm(...)
    f1 = reduce_scatter(g1); ...        f1 = reduce_scatter(g1); t1 = wait(f1)

On the left, whole gradients of all weights are in memory at once, and nothing computes beside communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import is_

from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.executors import torchex

from thunder_memsave.passes.overlap.facts import is_reduction
from thunder_memsave.passes.symbols import forward_symbols, is_joint, written_in_place


def reduce_early(trace: TraceCtx) -> TraceCtx:
    """Move reductions, and what only prepares them or reads them, to where their operands are made.

    Args:
        trace: A joint trace, with operations claimed by executors; an inference trace is returned unchanged.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols) or not any(map(is_reduction, symbols)):
        return trace
    reordered = list(_reordered(symbols, _around_reductions(symbols)))
    if all(map(is_, reordered, symbols)):
        return trace
    new = from_trace(trace)
    new.bound_symbols = reordered
    new.set_provenance(TraceProvenance("Joint pass reduce_early"))
    return new


def _around_reductions(symbols: Sequence[BoundSymbol]) -> set[int]:
    """Return the ids of the reductions, of what reads their results, and of what makes nothing but their operands."""
    found: set[int] = set()
    reduced: set[str] = set()
    for bsym in symbols:
        is_after = any(a.name in reduced for a in bsym.flat_proxy_args)
        if bsym.sym is not prims.python_return and (is_after or is_reduction(bsym)):
            found.add(id(bsym))
            reduced.update(o.name for o in bsym.flat_proxy_outs)
    forward = forward_symbols(symbols)
    read_elsewhere: set[str] = set()
    for bsym in reversed(symbols):
        if id(bsym) not in found:
            if _prepares(bsym, read_elsewhere) and id(bsym) not in forward:
                found.add(id(bsym))
            else:
                read_elsewhere.update(a.name for a in bsym.flat_proxy_args)
    return found


def _prepares(bsym: BoundSymbol, read_elsewhere: set[str]) -> bool:
    """Whether Thunder recorded it, such as a cast or rows of padding, for reductions alone."""
    is_thunders = bsym.sym.executor in (torchex.ex, None) and written_in_place(bsym) is None
    results = bsym.flat_proxy_outs
    return is_thunders and bool(results) and not any(o.name in read_elsewhere for o in results)


def _reordered(symbols: Sequence[BoundSymbol], moved: set[int]) -> Iterator[BoundSymbol]:
    """Yield the symbols; those to be moved right after the last of their operands."""
    made = {o.name for b in symbols for o in b.flat_proxy_outs}
    missing: dict[int, set[str]] = {}
    readers: dict[str, list[BoundSymbol]] = defaultdict(list)
    for bsym in symbols:
        operands = {a.name for a in bsym.flat_proxy_args} & made
        if id(bsym) in moved and operands:
            missing[id(bsym)] = operands
            for name in operands:
                readers[name].append(bsym)
    for bsym in symbols:
        if id(bsym) in missing:
            continue
        ready = [bsym]
        while ready:
            next_one = ready.pop(0)
            yield next_one
            for name in dict.fromkeys(o.name for o in next_one.flat_proxy_outs):
                for reader in readers[name]:
                    missing[id(reader)].discard(name)
                    if not missing[id(reader)]:
                        ready.append(reader)
