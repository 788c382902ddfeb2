"""Computes equal casts and views once: mixed precision casts an input of several linear layers for each of them.

    t1 = to(x, bfloat16)                         t1 = to(x, bfloat16)
    t2 = mm(t1, wq)                              t2 = mm(t1, wq)
    t3 = to(x, bfloat16)                ->       t4 = mm(t1, wk)
    t4 = mm(t3, wk)

Backward would keep each of them. What the caller gets, or passes in, stays as it is: a caller may write to it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance

from thunder_memsave.ops.aten_operators import operator_of
from thunder_memsave.passes.symbols import (
    emptied,
    forward_symbols,
    is_cast,
    renamed,
    written_in_place,
)

_ATEN = torch.ops.aten
_VIEWS = frozenset(
    {
        *(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.t.default, _ATEN.permute.default),
        *(_ATEN.transpose.int, _ATEN.unsqueeze.default, _ATEN.slice.Tensor, _ATEN.expand.default),
    }
)


def merge_equal(trace: TraceCtx) -> TraceCtx:
    """Return the trace without casts and views that it has before, each within forward or within backward.

    Args:
        trace: A joint trace, or an inference trace, with operations claimed by executors.
    """
    symbols = trace.bound_symbols
    forward = forward_symbols(symbols)
    made = {o.name for b in symbols for o in b.flat_proxy_outs}
    made -= {a.name for a in tree_flatten((trace.args, trace.kwargs))[0] if isinstance(a, Proxy)}
    made -= {name for b in symbols if (name := written_in_place(b)) is not None}
    returned = {a.name for a in symbols[-1].flat_proxy_args}
    first: dict[Hashable, BoundSymbol] = {}
    names: dict[str, Proxy] = {}
    kept = []
    for bsym in symbols:
        own = renamed(bsym, names, skip_output=True)
        if _is_pure(own) and _are_inside(own, made, returned):
            equal = first.setdefault((id(bsym) in forward, _key(own)), own)
            if equal is not own:
                names[own.output.name] = equal.output
                continue
        kept.append(own)
    if not names:
        return trace
    new = emptied(trace)
    new.bound_symbols = kept
    new.set_provenance(TraceProvenance("Joint pass merge_equal"))
    return new


def _is_pure(bsym: BoundSymbol) -> bool:
    is_one = isinstance(bsym.output, TensorProxy)
    return is_one and (is_cast(bsym) or operator_of(bsym) in _VIEWS)


def _are_inside(bsym: BoundSymbol, made: set[str], returned: set[str]) -> bool:
    """Return whether the trace makes what it reads, and does not return what it makes."""
    return bsym.output.name not in returned and all(a.name in made for a in bsym.flat_proxy_args)


def _key(bsym: BoundSymbol) -> Hashable:
    """Return what is equal for symbols that make equal tensors."""
    leaves, tree = tree_flatten((bsym.args, bsym.kwargs))
    read = tuple(leaf.name if isinstance(leaf, Proxy) else repr(leaf) for leaf in leaves)
    return (bsym.sym.name, str(tree), read)
