"""Makes a view of a view at once, and leaves out those that give back what they came from.

    t1 = mm(x, w)                                t1 = mm(x, w)
    t2 = unsafe_view(t1, [2, 8, 64])      ->     t3 = view(t1, [2, 8, 4, 16])
    t3 = view(t2, [2, 8, 4, 16])

    t4 = mm(t(g), x)                             return mm(t(g), x)
    return t(t(t4))

PyTorch's derivative of a linear layer has five transposes, of which one is needed. No view is a kernel, but each is a
call from Python, and on a GPU some steps wait for those.

The strides are those of the views one by one. PyTorch gives dims of one element strides by the shape before, and
kernels choose by them (a batch of one image may be taken for channels last): such views are joined only where the
strides before are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance

from thunder_memsave.ops.aten_operators import operator_of, operator_symbol
from thunder_memsave.passes.symbols import emptied, forward_symbols, is_joint, renamed

_ATEN = torch.ops.aten
_VIEW = _ATEN.view.default
_RESHAPES = frozenset({_VIEW, _ATEN._unsafe_view.default})
"""The second differs from the first for autograd alone, which sees nothing of a trace."""
_PERMUTES = frozenset({_ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default})
VIEWS = _RESHAPES | _PERMUTES
"""Operators that give a tensor another shape or order of dims, and move nothing."""
_CONTIGUOUS = frozenset({_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default})
"""Operators whose results are contiguous, whatever they read."""


def join_views(trace: TraceCtx) -> TraceCtx:
    """Return the trace with fewer views; the very same one where none can go.

    Args:
        trace: A joint trace, or an inference trace, with operations claimed by executors.
    """
    joined = _Joined(trace)
    kept = _read(joined.symbols, joined.views)
    if not joined.has_changed:
        return trace
    new = emptied(trace)
    new.bound_symbols = kept
    new.set_provenance(TraceProvenance("Joint pass join_views"))
    return new


class _Joined:
    """The symbols of a trace, whose views are of what is no view of the same kind."""

    def __init__(self, trace: TraceCtx) -> None:
        self.symbols: list[BoundSymbol] = []
        self.views: dict[str, BoundSymbol] = {}
        """Reshapes and transposes, by the names of what they make."""
        self._contiguous: set[str] = set()
        self.has_changed = False
        symbols = trace.bound_symbols
        given = tree_flatten((trace.args, trace.kwargs))[0]
        forward = forward_symbols(symbols)
        of_forward = [
            o
            for b in symbols
            if id(b) in forward or b.sym.id is PrimIDs.GET_GRAD
            for o in b.flat_proxy_outs
        ]
        returned = {a.name for a in symbols[-1].flat_proxy_args}
        self._gradients = _gradients(symbols)
        self._outputs = returned - self._gradients
        self._not_gradients = returned | {
            p.name for p in (*given, *of_forward) if isinstance(p, Proxy)
        }
        """Names of tensors that stand for no gradient: backward does not make them, or hands them over already."""
        names: dict[str, Proxy] = {}
        for bsym in symbols:
            self._follow(renamed(bsym, names, skip_output=True), names)

    def _follow(self, bsym: BoundSymbol, names: dict[str, Proxy]) -> None:
        """Append a symbol; a view as one of what its operand is a view of; or add under which name its result is."""
        operator = operator_of(bsym)
        if operator not in VIEWS:
            self.symbols.append(bsym)
            if operator in _CONTIGUOUS:
                self._contiguous.add(bsym.output.name)
            return
        before = self.views.get(bsym.args[0].name)
        if operator in _RESHAPES:
            source, bsym = self._reshaped(bsym, before)
        else:
            source = None if before is None else _permuted_back(bsym, before)
        if source is not None and self._may_stand_for(bsym.output, source):
            names[bsym.output.name] = source
            self.has_changed = True
            return
        self.symbols.append(bsym)
        # What the caller has is there for backward too, under this name: views of it stay views of it.
        if bsym.output.name not in self._outputs:
            self.views[bsym.output.name] = bsym

    def _reshaped(
        self, bsym: BoundSymbol, before: BoundSymbol | None
    ) -> tuple[TensorProxy | None, BoundSymbol]:
        """Return what a reshape gives back in its own shape, if anything, and it as one of what is no reshape."""
        source: TensorProxy = bsym.args[0]
        if before is not None and operator_of(before) in _RESHAPES:
            first: TensorProxy = before.args[0]
            if self._has_strides_of_shape(first, source, bsym.output):
                source = first
        if source is not bsym.args[0] or operator_of(bsym) is not _VIEW:
            bsym = bsym.from_bsym(sym=operator_symbol(_VIEW), args=(source, *bsym.args[1:]))
            self.has_changed = True
        is_back = tuple(source.shape) == tuple(bsym.output.shape)
        return (source if is_back and self._has_strides_of_shape(source) else None), bsym

    def _has_strides_of_shape(self, source: TensorProxy, *views: TensorProxy) -> bool:
        """Return whether a view of a tensor has the same strides whichever of its views is between."""
        sizes = [size for each in (source, *views) for size in each.shape]
        return min(sizes, default=1) > 1 or (source.name in self._contiguous and min(sizes) > 0)

    def _may_stand_for(self, result: Proxy, source: Proxy) -> bool:
        """Return whether a tensor may be in place of a view that is all of it."""
        if result.name in self._outputs:
            return False
        if result.name not in self._gradients:
            return True
        if source.name in self._not_gradients:
            return False
        self._not_gradients.add(source.name)
        return True


def _gradients(symbols: Sequence[BoundSymbol]) -> set[str]:
    """Return the names of the gradients that a joint trace returns, without those that are also something else."""
    if not is_joint(symbols):
        return set()
    result = symbols[-1].args[0]
    others = tree_flatten([value for key, value in result.items() if key != "output"])[0]
    gradients = {p.name for p in tree_flatten(result["output"])[0] if isinstance(p, Proxy)}
    return gradients - {p.name for p in others if isinstance(p, Proxy)}


def _permuted_back(view: BoundSymbol, before: BoundSymbol) -> TensorProxy | None:
    """Return the tensor that a permutation gives back after the one `before` it; None: it does not."""
    if operator_of(before) not in _PERMUTES:
        return None
    dims, dims_before = _permutation(view), _permutation(before)
    is_undone = all(dims_before[dim] == number for number, dim in enumerate(dims))
    source: TensorProxy = before.args[0]
    return source if is_undone else None


def _permutation(view: BoundSymbol) -> list[int]:
    """Return, for each dim of a result, the dim of the operand that it is."""
    operator, num_dims = operator_of(view), view.args[0].ndim
    dims = list(range(num_dims))
    if operator is _ATEN.permute.default:
        return [dims[dim] for dim in view.args[1]]
    if operator is _ATEN.t.default:
        return dims[::-1]
    one, other = view.args[1:]
    dims[one], dims[other] = dims[other], dims[one]
    return dims


def _read(symbols: Sequence[BoundSymbol], views: Mapping[str, BoundSymbol]) -> list[BoundSymbol]:
    """Return the symbols without views that nothing reads."""
    read: set[str] = set()
    kept = []
    for bsym in reversed(symbols):
        outputs = [o.name for o in bsym.flat_proxy_outs]
        if read.isdisjoint(outputs) and any(name in views for name in outputs):
            continue
        read.update(a.name for a in bsym.flat_proxy_args)
        kept.append(bsym)
    return kept[::-1]
