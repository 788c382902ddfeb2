"""Updates buffers in place where a trace makes a new value of one and copies it back, as BatchNorm's statistics.

    t1 = clone(mean); t2 = clone(var)                            y, ... = batch_norm_in_place(x, ..., mean, var, ...)
    y, ..., t3, t4 = batch_norm_functional(x, ..., t1, t2, ...)
    copy_(t3, mean); copy_(t4, var)

Until then the two are apart, so that a plan may compute the first again, of a buffer that is as it was. This runs where
the trace is final: what is computed twice has its clones read twice, and stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_memsave.ops.in_place import ADD, BATCH_NORMS
from thunder_memsave.passes.symbols import with_others, written_in_place

_STATISTICS = slice(3, 5)
"""Where the running statistics are among the arguments of a batch norm."""


def update_in_place(trace: TraceCtx) -> TraceCtx:
    """Return the forward with updates in place; the same one if there are none."""
    found = _Updates(trace.bound_symbols)
    for index, bsym in enumerate(trace.bound_symbols):
        if bsym.sym.name in BATCH_NORMS:
            found.batch_norm(index, bsym)
        elif bsym.sym.name == "aten_add_Tensor":
            found.sum(index, bsym)
    return with_others(trace, found.instead, found.left_out)


class _Updates:
    """The symbols of a trace that give way to others, by index."""

    def __init__(self, symbols: Sequence[BoundSymbol]) -> None:
        self.instead: dict[int, BoundSymbol] = {}
        self.left_out: set[int] = set()
        self._symbols = symbols
        self._made_at = {p.name: i for i, b in enumerate(symbols) for p in b.flat_proxy_outs}
        self._num_reads = Counter(p.name for b in symbols for p in b.flat_proxy_args)
        self._copies = {
            b.args[0].name: i for i, b in enumerate(symbols) if written_in_place(b) is not None
        }
        """Where a value is copied into a buffer."""

    def batch_norm(self, index: int, bsym: BoundSymbol) -> None:
        """Let it update its statistics itself, if they are clones of buffers to which the new ones are copied."""
        *results, new_mean, new_var = bsym.output
        clones = [self._clone(p) for p in bsym.args[_STATISTICS]]
        copies = [self._copy_of(p) for p in (new_mean, new_var)]
        if None in clones or None in copies:
            return
        buffers = [self._symbols[c].args[0] for c in clones if c is not None]
        for clone, copy, buffer in zip(clones, copies, buffers, strict=True):
            assert clone is not None and copy is not None  # noqa: PT018
            if written_in_place(self._symbols[copy]) != buffer.name:
                return
            if self._reads(buffer.name, clone + 1, copy):
                return
        args = list(bsym.args)
        args[_STATISTICS] = buffers
        self.instead[index] = BATCH_NORMS[bsym.sym.name].bind(*args, output=tuple(results))
        self.left_out |= {i for i in (*clones, *copies) if i is not None}

    def sum(self, index: int, bsym: BoundSymbol) -> None:
        """Add to a buffer in the place of the copy, where nothing else reads the sum."""
        buffer, number, *others = bsym.args
        copy = self._copy_of(bsym.output)
        if copy is None or others or bsym.kwargs or not isinstance(number, int | float):
            return
        if written_in_place(self._symbols[copy]) != buffer.name:
            return
        if self._writes(buffer.name, index, copy):
            return
        self.instead[copy] = ADD.bind(buffer, number, output=self._symbols[copy].output)
        self.left_out.add(index)

    def _clone(self, proxy: TensorProxy) -> int | None:
        """Return where a tensor was cloned that only one operator reads; None: it is none."""
        index = self._made_at.get(proxy.name)
        if index is None or self._num_reads[proxy.name] != 1:
            return None
        return index if self._symbols[index].sym.name == "aten_clone" else None

    def _copy_of(self, proxy: TensorProxy) -> int | None:
        """Return where a value is copied into a buffer, which alone reads it; None: it is read otherwise."""
        return self._copies.get(proxy.name) if self._num_reads[proxy.name] == 1 else None

    def _reads(self, name: str, start: int, end: int) -> bool:
        between = self._symbols[start:end]
        return any(name in {p.name for p in b.flat_proxy_args} for b in between)

    def _writes(self, name: str, start: int, end: int) -> bool:
        return any(written_in_place(b) == name for b in self._symbols[start:end])
