"""Recomputes a product's input as one more result of a kernel of backward, and runs the product behind that.

    bw_t3 = mul(t1, t2)                     t6 = mm(t4, w)
    t5 = mm(t4, bw_t3)                      t7 = mul(t6, t1)
    t6 = mm(t4, w)                ->        bw_t3 = mul(t1, t2)         # one kernel with the line above
    t7 = mul(t6, t1)                        t5 = mm(t4, bw_t3)

The plan says which (`planner/riding.py`), as its prices count on it. What needs the product's result comes with it, and
so does what is recomputed for `bw_t3`, if that keeps nothing longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

from thunder_memsave.passes.recompute import PREFIX
from thunder_memsave.passes.repeatable import communicates
from thunder_memsave.passes.symbols import is_joint, written_in_place


def recompute_in_kernels(trace: TraceCtx, *, joins: Mapping[str, str]) -> TraceCtx:
    """Move products, and what is recomputed for them, behind the kernels of backward that can recompute it.

    Args:
        trace: A joint trace after `recompute`; an inference trace is returned unchanged.
        joins: By the names of values of forward, a result of the kernel's first operation. Values that are not
            recomputed stay as they are.
    """
    symbols = trace.bound_symbols
    if not joins or not is_joint(symbols):
        return trace
    maker = {o.name: n for n, bsym in enumerate(symbols) for o in bsym.flat_proxy_outs}
    wanted: dict[int, list[int]] = {}
    """Clones, by the kernel's first operation."""
    for name, result in joins.items():
        clone = maker.get(f"{PREFIX}{name}")
        if clone is not None and clone < maker[result]:
            wanted.setdefault(maker[result], []).append(clone)
    order = _Order(symbols, maker)
    for first in sorted(wanted):
        order.move(sorted(wanted[first]), first)
    if not order.is_changed:
        return trace
    new = from_trace(trace)
    new.bound_symbols = [symbols[n] for n in order.numbers]
    new.set_provenance(TraceProvenance("Joint pass recompute_in_kernels"))
    return new


@dataclass(slots=True)
class _Readers:
    """Where the results of symbols are read."""

    by_name: Mapping[str, Sequence[int]]

    @classmethod
    def of(cls, symbols: Sequence[BoundSymbol]) -> _Readers:
        found: dict[str, list[int]] = {}
        for number, bsym in enumerate(symbols):
            for proxy in bsym.flat_proxy_args:
                found.setdefault(proxy.name, []).append(number)
        return cls(found)

    def of_symbol(self, bsym: BoundSymbol) -> list[int]:
        return [r for o in bsym.flat_proxy_outs for r in self.by_name.get(o.name, ())]


class _Order:
    """An order of symbols, which have the numbers of their first places."""

    def __init__(self, symbols: Sequence[BoundSymbol], maker: Mapping[str, int]) -> None:
        self._symbols, self._maker = symbols, maker
        self._readers = _Readers.of(symbols)
        self.numbers = list(range(len(symbols)))
        self.is_changed = False
        self._moved_to = 0
        """The last place up to which symbols have moved."""

    def move(self, clones: Sequence[int], first: int) -> None:
        """Move some clones behind a symbol, with all that reads them; leave them if that may not be."""
        coming = self._following(clones, first)
        if coming is None or coming <= set(clones):
            return
        sinking = self._sinking(coming, first)
        start = min(coming | sinking)
        passed = [n for n in range(start, first + 1) if n not in coming and n not in sinking]
        if start < self._moved_to or not self._may_pass(coming | sinking, passed):
            return
        before = self._needed(first, sinking)
        stay = [n for n in passed if n != first]
        behind = sorted((coming | sinking) - before)
        self.numbers[start : first + 1] = [*stay, *sorted(before), first, *behind]
        self.is_changed, self._moved_to = True, first + 1

    def _following(self, clones: Sequence[int], first: int) -> set[int] | None:
        """Return clones and what before a symbol needs them; None: that symbol does."""
        found, made = set(clones), set[str]()
        for number in range(clones[0], first + 1):
            bsym = self._symbols[number]
            if number in found or any(a.name in made for a in bsym.flat_proxy_args):
                found.add(number)
                made.update(o.name for o in bsym.flat_proxy_outs)
        return None if first in found else found

    def _sinking(self, coming: set[int], first: int) -> set[int]:
        """Return other clones that nothing reads before, and that read only what is there until then anyway."""
        found: set[int] = set()
        stack = list(coming)
        while stack:
            for proxy in self._symbols[stack.pop()].flat_proxy_args:
                number = self._maker.get(proxy.name)
                if number is None or number in found or number in coming:
                    continue
                if self._may_sink(number, coming | found, first):
                    found.add(number)
                    stack.append(number)
        return found

    def _may_sink(self, number: int, others: set[int], first: int) -> bool:
        bsym = self._symbols[number]
        if BoundSymbolTag.RECOMPUTE_IN_BACKWARD not in bsym.tags or communicates(bsym):
            return False
        if not all(r >= first or r in others for r in self._readers.of_symbol(bsym)):
            return False
        read = [a.name for a in bsym.flat_proxy_args]
        return all(any(r >= first for r in self._readers.by_name[name]) for name in read)

    def _may_pass(self, moving: set[int], passed: Sequence[int]) -> bool:
        """Return whether no write is passed, nor a collective by another one."""
        everything = [self._symbols[n] for n in (*moving, *passed)]
        if any(written_in_place(bsym) is not None for bsym in everything):
            return False
        is_sent = any(communicates(self._symbols[n]) for n in moving)
        return not (is_sent and any(communicates(self._symbols[n]) for n in passed))

    def _needed(self, first: int, among: set[int]) -> set[int]:
        """Return those of some symbols from which what a symbol reads follows."""
        found: set[int] = set()
        stack = [first]
        while stack:
            for proxy in self._symbols[stack.pop()].flat_proxy_args:
                number = self._maker.get(proxy.name)
                if number in among and number not in found:
                    found.add(number)
                    stack.append(number)
        return found
