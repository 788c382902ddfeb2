"""Adds no zeros for outputs of which the caller gives no gradient.

    g = get_grad(logits)                  g = get_grad(logits)      # None, of a model that returns its loss too
    t1 = add(g, dlogits)          ->      t1 = add_if_given(dlogits, g)

Transformers' models return logits, and keys and values of all layers, beside their loss. Autograd gives no gradient of
these; as zeros they would be as many bytes, made at the begin of backward, read once and added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance

from thunder_memsave.measure.layouts import contiguous
from thunder_memsave.ops.added_gradients import adding_if_given, stride_laid_out
from thunder_memsave.ops.aten_operators import operator_of
from thunder_memsave.passes.join_views import VIEWS
from thunder_memsave.passes.symbols import forward_symbols, with_others

_ATEN = torch.ops.aten


def without_zeros(trace: TraceCtx, absent: Collection[str]) -> TraceCtx:
    """Return the trace without these zeros; the very same one where none can go.

    Args:
        trace: A joint trace with operations claimed by executors.
        absent: Names of the outputs of which the caller is expected to give no gradient. It may give some: they are
            added.
    """
    found = _Sums(trace.bound_symbols)
    for bsym in trace.bound_symbols:
        if bsym.sym.id is PrimIDs.GET_GRAD and bsym.args[0].name in absent:
            found.add(bsym.output)
    if not found.instead:
        return trace
    new = with_others(trace, found.instead, found.left_out)
    new.set_provenance(TraceProvenance("Joint pass leave_out_zeros"))
    return new


class _Sums:
    """The sums of a trace in which gradients are that the caller gives."""

    def __init__(self, symbols: Sequence[BoundSymbol]) -> None:
        self.instead: dict[int, BoundSymbol] = {}
        """Sums with what may be absent, by the indices of those that they stand for."""
        self.left_out: set[int] = set()
        """Indices of symbols that only lay out what is added."""
        self._index = {id(bsym): index for index, bsym in enumerate(symbols)}
        self._forward = forward_symbols(symbols)
        self._readers: dict[str, list[BoundSymbol]] = defaultdict(list)
        """A symbol is there once for each time that it reads a value."""
        self._maker: dict[str, BoundSymbol] = {}
        for bsym in symbols:
            for proxy in bsym.flat_proxy_args:
                self._readers[proxy.name].append(bsym)
            for proxy in bsym.flat_proxy_outs:
                self._maker.setdefault(proxy.name, bsym)

    def add(self, given: TensorProxy) -> None:
        """Look at what reads a gradient that the caller may give."""
        value, stride = given, contiguous(given).stride
        layouts = [b for b in self._readers[given.name] if stride_laid_out(b) is not None]
        if layouts:
            value, stride = layouts[0].output, layouts[0].args[1]
        if len(self._readers[given.name]) > 1 or len(self._readers[value.name]) != 1:
            return
        (reader,) = self._readers[value.name]
        computed = next((a for a in reader.flat_proxy_args if a.name != value.name), None)
        if operator_of(reader) is not _ATEN.add.Tensor or reader.kwargs or computed is None:
            return
        kinds = {(tuple(p.shape), p.dtype, p.device) for p in (computed, value)}
        if len(kinds) == 1 and self._is_made_for_it(computed):
            self.instead[self._index[id(reader)]] = adding_if_given(reader, computed, given, stride)
            self.left_out.update(self._index[id(b)] for b in layouts)

    def _is_made_for_it(self, value: TensorProxy) -> bool:
        """Return whether an operator of backward makes a value in new memory, which nothing else reads."""
        maker = self._maker.get(value.name)
        if maker is None or id(maker) in self._forward or len(self._readers[value.name]) != 1:
            return False
        operator = operator_of(maker)
        if operator in VIEWS:
            return self._is_made_for_it(maker.args[0])
        return operator is not None and not any(
            r.alias_info is not None for r in operator._schema.returns
        )
