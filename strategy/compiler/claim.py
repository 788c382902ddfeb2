"""Lets executors claim the operations of a trace, with Thunder's own transform for those that anything claims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol, Symbol
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors.passes import _transform_for_operator_executor_execution
from thunder.extend import Executor, OperatorExecutor

from thunder_memsave.passes.symbols import emptied

_MARK = Symbol(name="mark", meta=None, is_prim=True, python_impl=lambda: None)
"""Stands between operations, and is kept."""


def claimed(trace: TraceCtx, executors: Sequence[Executor]) -> TraceCtx:
    """Return the trace with operations that executors run.

    Thunder offers to no executor what a rule for execution records in place of an operation: a cast before a kernel, or
    the operators of the whole graph. So these are offered until nothing is left. Rules for gradients have run before,
    so their parts are claimed.
    """
    trace = _claimed_once(trace, executors)
    while any(map(_is_unclaimed, trace.bound_symbols)):
        trace = _claimed_once(trace, executors)
    return trace


def _claimed_once(trace: TraceCtx, executors: Sequence[Executor]) -> TraceCtx:
    """Do what Thunder's transform does, which makes every operation anew, with those that it would change alone.

    Operations that are made of others have rules, which record as many as they like: then it gets all.
    """
    waiting = [b for b in trace.bound_symbols if not _stays(b, executors)]
    if not all(b.sym.is_prim for b in waiting):
        return _transform_for_operator_executor_execution(trace, executors)
    part = emptied(trace)
    part.bound_symbols = [b for each in waiting for b in (each, _MARK.bind(output=None))]
    part.bound_symbols.append(prims.python_return.bind((), output=None))
    done = _transform_for_operator_executor_execution(part, executors)
    found = _one_for_each(waiting, done.bound_symbols[:-1])
    if found is None:
        return _transform_for_operator_executor_execution(trace, executors)
    new = from_trace(done)
    new.bound_symbols = list(_replaced(trace.bound_symbols, waiting, found))
    return new


def _is_unclaimed(bsym: BoundSymbol) -> bool:
    """Whether nothing can run it yet."""
    symbol = bsym.sym
    return not (symbol.executor or symbol.python_impl or symbol.id is PrimIDs.GET_GRAD)


def _stays(bsym: BoundSymbol, executors: Sequence[Executor]) -> bool:
    """Return whether no executor claims an operation, and something runs it already."""
    symbol = bsym.sym
    if symbol.python_impl is not None or symbol.id is PrimIDs.GET_GRAD:
        return True
    return symbol.executor is not None and not any(
        symbol.id in each.implmap or not isinstance(each, OperatorExecutor) for each in executors
    )


def _one_for_each(
    waiting: Sequence[BoundSymbol], done: Sequence[BoundSymbol]
) -> list[BoundSymbol] | None:
    """Return what runs instead of each operation; None: not always is it one operation with as many results."""
    groups = [list(g) for is_mark, g in groupby(done, key=lambda b: b.sym is _MARK) if not is_mark]
    if [len(group) for group in groups] != [1] * len(waiting):
        return None
    pairs = zip(waiting, groups, strict=True)
    if any(len(a.flat_proxy_outs) != len(b.flat_proxy_outs) for a, (b,) in pairs):
        return None
    return [after for (after,) in groups]


def _replaced(
    symbols: Sequence[BoundSymbol], waiting: Sequence[BoundSymbol], found: Sequence[BoundSymbol]
) -> Iterator[BoundSymbol]:
    """Yield the operations, those that are claimed in the place of those that waited; the others read their results."""
    instead_of = {id(b): after for b, after in zip(waiting, found, strict=True)}
    results = (
        zip(*(b.flat_proxy_outs for b in pair), strict=True)
        for pair in zip(waiting, found, strict=True)
    )
    changed = [(old, new) for pairs in results for old, new in pairs if old.name != new.name]
    swaps: dict[Any, Proxy] = {variableify(old): new for old, new in changed}
    names = {old.name for old, _ in changed}
    for bsym in symbols:
        after = instead_of.get(id(bsym))
        if after is not None:
            yield after
        elif any(p.name in names for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)):
            yield bsym.from_bsym_swap_proxies(swaps)
        else:
            yield bsym
