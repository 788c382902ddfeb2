"""Computes wide values of tokens, such as those inside of an MLP, a tile of tokens at a time.

Before, with values that are wider than what goes in and out:

    t1 = aten_mm(x, w1)                             # (tokens, 4 h)
    t2 = aten_gelu(t1)
    t3 = aten_mm(t2, w2)                            # (tokens, h)
    ...
    t7 = aten_mm(g, w2_t)                           # backward
    t8 = aten_gelu_backward(t7, t1)
    t9 = aten_mm(t8, w1_t)
    g1 = aten_mm(t8_t, x)

After:

    (t3,) = rows_in_tiles_1(x, w1, w2)
    ...
    (t9, g1) = rows_in_tiles_2(g, w2_t, x, w1, w1_t)

Backward computes `t1` of a tile again before it differentiates it, so that wide values exist for one tile at most,
whatever a plan keeps. Weights are read whole, by all tiles. The numbers of a row are those of the same operators; sums
over rows are added up in another order, in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from thunder.core import dtypes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance

from thunder_memsave.ops.row_tiles import (
    RowOperand,
    RowProgram,
    RowResult,
    RowStep,
    Slot,
    rows_per_tile,
    symbol_of,
)
from thunder_memsave.passes.symbols import emptied, is_joint
from thunder_memsave.passes.tiles.row_kinds import RowKinds, row_kinds
from thunder_memsave.passes.tiles.row_regions import RowRegion, row_regions


def tile_rows(trace: TraceCtx, *, weights: Collection[str]) -> TraceCtx:
    """Let regions of wide values run in tiles.

    Args:
        trace: A joint trace, with operations claimed by executors; an inference trace is returned unchanged.
        weights: Names of the arguments that are no part of a batch.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols):
        return trace
    rows = row_kinds(symbols, weights=weights)
    regions = [] if rows is None else row_regions(symbols, rows)
    if rows is None or not regions:
        return trace
    merged = _Merged(symbols, rows, regions)
    new = emptied(trace)
    new.bound_symbols = list(merged.emitted())
    if not merged.is_changed:
        return trace
    new.set_provenance(TraceProvenance("Joint pass tile_rows"))
    return new


class _Merged:
    """Emits a trace with one symbol in place of the forward, and one of the backward, of each region."""

    def __init__(
        self, symbols: Sequence[BoundSymbol], rows: RowKinds, regions: Sequence[RowRegion]
    ) -> None:
        self._symbols = symbols
        self.is_changed = False
        read: dict[str, set[int]] = {}
        for bsym in symbols:
            for argument in bsym.flat_proxy_args:
                read.setdefault(argument.name, set()).add(id(bsym))
        while True:
            self._halves: dict[int, tuple[RowRegion, list[BoundSymbol]]] = {}
            for region in regions:
                for half in (list(region.forward), list(region.backward)):
                    self._halves.update((id(b), (region, half)) for b in half)
            late = self._late_region()
            if late is None:
                break
            regions = [r for r in regions if r is not late]
        self._builder = _Builder(rows, read)

    def emitted(self) -> Iterator[BoundSymbol]:
        """Yield all symbols, readers of a region's results after it."""
        late: set[str] = set()
        waiting: list[BoundSymbol] = []
        for bsym in self._symbols:
            region, half = self._halves.get(id(bsym), (None, [bsym]))
            if bsym is not half[-1]:
                late.update(o.name for o in bsym.flat_proxy_outs)
            elif region is not None:
                self.is_changed = True
                yield self._builder.symbol(region, half)
                late -= {o.name for b in half for o in b.flat_proxy_outs}
                ready, waiting = _ready(waiting, late)
                yield from ready
            elif any(a.name in late for a in bsym.flat_proxy_args):
                late.update(o.name for o in bsym.flat_proxy_outs)
                waiting.append(bsym)
            else:
                yield bsym
        assert not waiting, "what reads a region's results comes after it"

    def _late_region(self) -> RowRegion | None:
        """Return a region that reads what its own results, or those of one around it, decide."""
        late: set[str] = set()
        waiting: list[BoundSymbol] = []
        for bsym in self._symbols:
            region, half = self._halves.get(id(bsym), (None, [bsym]))
            own = {o.name for b in half for o in b.flat_proxy_outs}
            if bsym is not half[-1]:
                late.update(o.name for o in bsym.flat_proxy_outs)
            elif region is not None:
                if any(a.name in late - own for b in half for a in b.flat_proxy_args):
                    return region
                late -= own
                _, waiting = _ready(waiting, late)
            elif any(a.name in late for a in bsym.flat_proxy_args):
                late.update(o.name for o in bsym.flat_proxy_outs)
                waiting.append(bsym)
        return None


def _ready(
    waiting: Sequence[BoundSymbol], late: set[str]
) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """Return those that read nothing late any more, and the others; the results of the former are late no more."""
    ready: list[BoundSymbol] = []
    others: list[BoundSymbol] = []
    for bsym in waiting:
        if any(a.name in late for a in bsym.flat_proxy_args):
            others.append(bsym)
        else:
            late -= {o.name for o in bsym.flat_proxy_outs}
            ready.append(bsym)
    return ready, others


class _Builder:
    """Makes the symbol of one half of a region."""

    def __init__(self, rows: RowKinds, read: dict[str, set[int]]) -> None:
        self._rows = rows
        self._read = read

    def symbol(self, region: RowRegion, half: Sequence[BoundSymbol]) -> BoundSymbol:
        """Return what computes all of `half` that others read."""
        recomputed = _recomputed(region)
        is_forward = half[-1] is region.forward[-1]
        members = list(half) if is_forward else [*recomputed, *half]
        own = set(map(id, half)) - set(map(id, recomputed))
        made = [o for b in half for o in b.flat_proxy_outs if o.name not in region.wide]
        results = [o for o in made if self._read.get(o.name, set()) - own]
        program, operands, row_bytes = self._program(members, results)
        rows = rows_per_tile(self._rows.num_rows, row_bytes)
        shapes = [list(map(int, r.shape)) for r in results]
        bsym = symbol_of(program).bind(rows, shapes, *operands, output=tuple(results))
        bsym.tags = half[-1].tags.copy()
        return bsym

    def _program(
        self, members: Sequence[BoundSymbol], results: Sequence[TensorProxy]
    ) -> tuple[RowProgram, list[Proxy], int]:
        made = {o.name for b in members for o in b.flat_proxy_outs}
        operands = list(
            {a.name: a for b in members for a in b.flat_proxy_args if a.name not in made}.values()
        )
        slots = {p.name: n for n, p in enumerate(operands)}
        for bsym in members:
            for o in bsym.flat_proxy_outs:
                slots[o.name] = len(slots)
        kinds = self._rows.of
        program = RowProgram(
            operands=tuple(RowOperand(kinds[p.name].kind, kinds[p.name].dims) for p in operands),
            steps=(),
            results=tuple(self._result(r, slots) for r in results),
            is_on_cuda=results[0].device.type == "cuda",
        ).with_steps([self._step(b, slots) for b in members])
        return program, operands, self._row_bytes(members, program.steps)

    def _step(self, bsym: BoundSymbol, slots: dict[str, int]) -> RowStep:
        return RowStep(
            operator=str(bsym.sym.name),
            args=tuple(_slotted(a, slots) for a in bsym.args),
            kwargs=tuple((k, _slotted(a, slots)) for k, a in sorted(bsym.kwargs.items())),
            makes=tuple(slots[o.name] for o in bsym.flat_proxy_outs),
            view=self._rows.row_wise[id(bsym)].view,
        )

    def _result(self, proxy: TensorProxy, slots: dict[str, int]) -> RowResult:
        kind = self._rows.of[proxy.name]
        assert kind.kind != "columns", "a transpose is as wide as its operand"
        dtype = dtypes.to_torch_dtype(proxy.dtype)
        is_sum = kind.kind == "whole"
        return RowResult(slots[proxy.name], "sum" if is_sum else "rows", dtype, kind.dims)

    def _row_bytes(self, members: Sequence[BoundSymbol], steps: Sequence[RowStep]) -> int:
        """Return the most that the values of a row take, each with memory of its own."""
        live: dict[int, int] = {}
        most = 0
        for bsym, step in zip(members, steps, strict=True):
            for slot, o in zip(step.makes, bsym.flat_proxy_outs, strict=True):
                is_view = step.view is not None
                live[slot] = 0 if is_view else self._rows.width(o) * int(o.dtype.bytes)
            most = max(most, sum(live.values()))
            for slot in step.frees:
                live.pop(slot, None)
        return most


def _recomputed(region: RowRegion) -> list[BoundSymbol]:
    """Return what makes the wide values of forward that backward reads."""
    needed = {a.name for b in region.backward for a in b.flat_proxy_args} & region.wide
    found: list[BoundSymbol] = []
    for bsym in reversed(region.forward):
        if any(o.name in needed for o in bsym.flat_proxy_outs):
            found.append(bsym)
            needed |= {a.name for a in bsym.flat_proxy_args} & region.wide
    return found[::-1]


def _slotted(value: Any, slots: dict[str, int]) -> Any:
    if isinstance(value, Proxy):
        return Slot(slots[value.name])
    if isinstance(value, (tuple, list)):
        return tuple(_slotted(v, slots) for v in value)
    return value
