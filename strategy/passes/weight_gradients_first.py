"""Computes a weight's gradient before the gradient of what its layer read, so that both inputs are not there at once.

PyTorch differentiates `addmm`, a linear layer with bias, in the other order than `mm`, one without:

    g1 = mm(g, weight)             gw = mm(t(g), x)
    gw = mm(t(g), x)        ->     g1 = mm(g, weight)

On the left `x`, of which the weight's gradient is the last reader, is held beside `g1`, which has its shape: on the
right it is freed before. Where it has another reader later, memory is the same. Under zero3 the order stays: a gathered
weight, which is freed after `g1`, would be held beside its whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

from thunder_memsave.ops.families.collectives import is_all_gather
from thunder_memsave.passes.symbols import forward_symbols, is_joint, written_in_place

_PRODUCT, _TRANSPOSED = "aten_mm", "aten_t"


def weight_gradients_first(trace: TraceCtx) -> TraceCtx:
    """Move products of gradients with weights behind those that make the weights' gradients.

    Args:
        trace: A joint trace, with operations claimed by executors; an inference trace is returned unchanged.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols) or any(map(is_all_gather, symbols)):
        return trace
    if not (places := _places(symbols)):
        return trace
    behind = {after: symbols[place] for place, after in places.items()}
    new = from_trace(trace)
    new.bound_symbols = [
        moved
        for index, bsym in enumerate(symbols)
        if index not in places
        for moved in ((bsym, behind[index]) if index in behind else (bsym,))
    ]
    new.set_provenance(TraceProvenance("Joint pass weight_gradients_first"))
    return new


def _places(symbols: Sequence[BoundSymbol]) -> dict[int, int]:
    """Return the indices of the products that move, each with that of the product behind which it comes."""
    forward = forward_symbols(symbols)
    transposed: dict[str, str] = {}
    products: dict[str, int] = {}
    """The last product of each tensor as its first factor, that may move."""
    read: dict[str, int] = {}
    """Where each tensor is read first."""
    for index, bsym in enumerate(symbols):
        for p in bsym.flat_proxy_args:
            read.setdefault(p.name, index)
    found: dict[int, int] = {}
    for index, bsym in enumerate(symbols):
        if id(bsym) in forward:
            continue
        if bsym.sym.name == _TRANSPOSED:
            transposed[bsym.output.name] = bsym.args[0].name
        elif bsym.sym.name == _PRODUCT:
            first = products.pop(transposed.get(bsym.args[0].name, ""), None)
            if first is not None and read.get(symbols[first].output.name, index) > index:
                between = symbols[first + 1 : index]
                if all(written_in_place(each) is None for each in between):
                    found[first] = index
            products[bsym.args[0].name] = index
    return found
