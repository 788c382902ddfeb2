"""Compute in bfloat16 what is bfloat16: drop the casts around an operation that computes in float32 by itself.

Thunder spells out the promotion of two-byte floats. Before:

    t1 = Tensor.to(a, torch.float32, copy=True)
    t2 = Tensor.to(b, torch.float32, copy=True)
    t3 = torch.mul(t1, t2)                          # f32
    t4 = Tensor.to(t3, torch.bfloat16, copy=True)

After:

    t4 = torch.mul(a, b)                            # bf16

PyTorch's own kernel casts each element to float32, computes, and rounds once, so every bit stays; 6 bytes per element
are moved in place of 26. A value that is cast up and then down again is read as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from thunder.core import dtypes, prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace
from thunder.core.transform_common import dce

from thunder_memsave.passes.symbols import is_cast, primitives, renamed, written_in_place

_ROUND_ONCE = frozenset(
    {
        prims.PrimIDs.ADD,
        prims.PrimIDs.SUB,
        prims.PrimIDs.MUL,
        prims.PrimIDs.DIV,
        prims.PrimIDs.NEG,
    }
)
"""Operations whose kernels for two-byte floats have the bits of computing in float32 and rounding the result."""
_WITH_NUMBER = frozenset({prims.PrimIDs.MUL, prims.PrimIDs.DIV})
"""Those of which that is true also for a tensor and a number, in this order."""
_SMALL = (dtypes.bfloat16, dtypes.float16)


def fold_casts(trace: TraceCtx) -> TraceCtx:
    """Drop casts to float32 and back around operations that round once.

    Args:
        trace: A joint or an inference trace, with operations claimed by executors.
    """
    folds = _Folds.of(trace.bound_symbols)
    if not folds.small and not folds.same:
        return trace
    new = from_trace(trace)
    new.bound_symbols = list(folds.rewritten(trace.bound_symbols))
    new = dce(new)
    new.set_provenance(TraceProvenance("Joint pass fold_casts"))
    return new


@dataclass(frozen=True, slots=True)
class _Folds:
    """Changes to make in a trace."""

    small: dict[str, TensorProxy] = field(default_factory=dict)
    """Maps the name of a float32 result to the two-byte value to compute in its place, the first of its casts."""
    same: dict[str, Proxy] = field(default_factory=dict)
    """Maps the name of a value to the one to read in its place."""
    sources: dict[str, TensorProxy] = field(default_factory=dict)
    """Maps the name of a value cast to float32 to the two-byte value that was cast."""

    @classmethod
    def of(cls, symbols: Sequence[BoundSymbol]) -> _Folds:
        """Find what to fold: nothing may be written in place between a cast and what then reads its source."""
        folds, readers, writes = cls(), _readers(symbols), _num_writes(symbols)
        cast_at: dict[str, int] = {}
        for position, bsym in enumerate(symbols):
            if (source := _cast_up(bsym)) is not None:
                folds.sources[bsym.output.name], cast_at[bsym.output.name] = source, position
        for position, bsym in enumerate(symbols):
            if _rounds_once(bsym):
                read = [a.name for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
                if all(n in cast_at and writes[cast_at[n]] == writes[position] for n in read):
                    folds._add(bsym.output, read, readers[bsym.output.name])
            elif not writes[-1] and (source := folds._undone(bsym)) is not None:
                result = bsym.output.name
                if all(r.sym is not prims.python_return for r in readers[result]):
                    folds.same[result] = source
        return folds

    def _add(
        self, result: TensorProxy, read: Sequence[str], readers: Sequence[BoundSymbol]
    ) -> None:
        found = {self.sources[name].dtype for name in read}
        casts = [r.output for r in readers if is_cast(r) and r.output.dtype in found]
        if len(found) == 1 and casts and len(casts) == len(readers):
            self.small[result.name] = casts[0]
            self.same.update({other.name: casts[0] for other in casts[1:]})

    def _undone(self, bsym: BoundSymbol) -> TensorProxy | None:
        """Return the value that this symbol casts back to its own dtype."""
        if not is_cast(bsym):
            return None
        source = self.sources.get(bsym.flat_proxy_args[0].name)
        return source if source is not None and source.dtype is bsym.output.dtype else None

    def rewritten(self, symbols: Sequence[BoundSymbol]) -> Iterator[BoundSymbol]:
        """Yield the symbols as they are to be."""
        dropped = {small.name for small in self.small.values()} | self.same.keys()
        named: dict[str, Proxy] = {}
        for name, other in self.same.items():
            named[name] = named.get(other.name, other)
        for bsym in symbols:
            outputs = bsym.flat_proxy_outs
            if len(outputs) == 1 and outputs[0].name in dropped:
                continue
            if len(outputs) == 1 and outputs[0].name in self.small:
                operands: Mapping[str, Proxy] = {
                    a.name: named.get(self.sources[a.name].name, self.sources[a.name])
                    for a in bsym.flat_proxy_args
                    if a.name in self.sources
                }
                names = {**operands, outputs[0].name: self.small[outputs[0].name]}
                yield renamed(_tensor_first(bsym), names)
            else:
                yield renamed(bsym, named) if named else bsym


def _readers(symbols: Sequence[BoundSymbol]) -> Mapping[str, list[BoundSymbol]]:
    readers: dict[str, list[BoundSymbol]] = defaultdict(list)
    for bsym in symbols:
        for name in {a.name for a in bsym.flat_proxy_args}:
            readers[name].append(bsym)
    return readers


def _num_writes(symbols: Sequence[BoundSymbol]) -> Sequence[int]:
    """Return the number of writes in place up to each symbol."""
    return list(accumulate(written_in_place(bsym) is not None for bsym in symbols))


def _tensor_first(bsym: BoundSymbol) -> BoundSymbol:
    """Return the product of a number and a tensor as that of the tensor and the number, any other symbol as it is."""
    if primitives(bsym) != {prims.PrimIDs.MUL} or isinstance(bsym.args[0], TensorProxy):
        return bsym
    first, second, *rest = bsym.args
    return bsym.from_bsym(args=(second, first, *rest))


def _rounds_once(bsym: BoundSymbol) -> bool:
    found = primitives(bsym)
    if bsym.sym.executor is None or len(found) != 1 or not found <= _ROUND_ONCE:
        return False
    # On the CPU a number is rounded to the tensor's dtype first, but for a second factor and a divisor.
    first, *second = _tensor_first(bsym).args[:2]
    is_exact = found <= _WITH_NUMBER or all(isinstance(a, TensorProxy) for a in second)
    return isinstance(first, TensorProxy) and is_exact and bsym.kwargs.get("alpha", 1) == 1


def _cast_up(bsym: BoundSymbol) -> TensorProxy | None:
    """Return the two-byte value that this symbol casts to float32."""
    if not is_cast(bsym) or bsym.output.dtype is not dtypes.float32:
        return None
    source = bsym.flat_proxy_args[0]
    return source if isinstance(source, TensorProxy) and source.dtype in _SMALL else None
