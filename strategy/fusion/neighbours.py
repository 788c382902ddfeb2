"""Moves operators beside those with which they fuse, where kernels move fewer bytes and the step holds no more.

    t1 = silu(t0)            t2 = mm(x, w)
    t2 = mm(x, w)     ->     t1 = silu(t0)
    t3 = mul(t1, t2)         t3 = mul(t1, t2)

They move over PyTorch's own operators, uses of gradients, and copies of states: what communicates, draws or writes
keeps its place, and so do products of matrices among themselves. What reads a weight stays before its update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from thunder.core.proxies import Proxy

from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion.memory import Memory, Placed, makers_of, readers_of
from thunder_memsave.fusion.operators import Kind
from thunder_memsave.ops.updated_parameters import updated_name, updates_parameter

_OF_A_KERNEL = 4 * 2**20
"""Bytes that an H100 moves in the 2 us that a kernel takes at least."""
_FARTHEST = 64
"""Symbols over which one moves at most: what is so far apart is seldom worth the search."""


def beside(symbols: Sequence[Placed], values: Values) -> list[Placed]:
    """Return the symbols in their new order.

    Args:
        symbols: Of a trace in its final order.
        values: All values of the trace.
    """
    order = _Order(symbols, values)
    fusing = [number for number, placed in enumerate(symbols) if placed.kind is Kind.FUSES]
    for number in reversed(fusing):
        order.move_back(number)
    for number in fusing:  # what it reads may have moved
        order.move_forward(number)
    return [symbols[number] for number in order.numbers]


class _Order:
    """An order of symbols, which have the numbers of their first places."""

    def __init__(self, symbols: Sequence[Placed], values: Values) -> None:
        self._symbols = symbols
        self._memory = Memory(symbols, values)
        self._moved = _MovedBytes(symbols, values)
        self.numbers = list(range(len(symbols)))
        self._place = list(range(len(symbols)))
        """The place of each symbol, by its number."""
        bsyms = [placed.bsym for placed in symbols]
        self._readers, self._maker = readers_of(bsyms), makers_of(bsyms)
        self._last = dict(self._memory.last)
        """The place of the last use of a storage."""
        self._before, self._most = self._memory.held_before(len(symbols))
        """Bytes that are held before each place, and the most that ever are."""

    def move_back(self, number: int) -> None:
        """Move a symbol to just before its first reader, if that fuses and kernels move less for it."""
        readers = [
            self._place[r]
            for proxy in self._symbols[number].bsym.flat_proxy_outs
            for r in self._readers[proxy.name]
        ]
        if not readers:
            return
        start, stop = self._place[number], min(readers)
        if self._symbols[self.numbers[stop]].kind is not Kind.FUSES:
            return
        between = self.numbers[start + 1 : stop]
        if self._may_pass(between) and not any(self._writes_over(n, number) for n in between):
            self._is_reordered(start, [*between, number, self.numbers[stop]])

    def move_forward(self, number: int) -> None:
        """Move a symbol to just after the last of those that make what it reads, if kernels move less for it.

        Otherwise what reads it comes along, if they do then, or all of its run that can.
        """
        makers = [self._place[m] for m in self._read_by(number)[1]]
        if not makers:
            return
        start = max(makers)
        if not self._may_pass(self.numbers[start + 1 : self._place[number]]):
            return
        coming: list[int] = []
        for fewest in (None, 1, 0):
            others = self._followers(number, start, fewest) if fewest is not None else ()
            before, coming = coming, self._with_views({number, *others}, start)
            if coming == before:
                continue
            span = self.numbers[start + 1 : self._place[coming[-1]] + 1]
            rest = [n for n in span if n not in coming]
            if any(self._writes_over(c, n) for c in coming for n in rest):
                return
            if self._is_reordered(start, [self.numbers[start], *coming, *rest]):
                return

    def _followers(self, number: int, start: int, fewest: int) -> set[int]:
        """Return the symbols after one, in its run, that can follow it to after a place.

        Args:
            number: Of the symbol.
            start: The place.
            fewest: Number of symbols, among it and its followers, that each reads at least.
        """
        coming = {number}
        for place in range(self._place[number] + 1, len(self.numbers)):
            other = self.numbers[place]
            kind = self._symbols[other].kind
            if kind is Kind.OTHER:
                break
            later = {m for m in self._read_by(other)[1] if self._place[m] > start}
            if kind is Kind.FUSES and len(later) >= fewest and later <= coming:
                coming.add(other)
        return coming - {number}

    def _with_views(self, numbers: set[int], start: int) -> list[int]:
        """Return symbols that move to after a place, in their order, with the views through which they read."""
        views = {v for n in numbers for v in self._read_by(n)[0] if self._place[v] > start}
        return sorted(numbers | views, key=self._place.__getitem__)

    def _window(self, start: int, stop: int) -> tuple[int, int]:
        """Return the places of the runs that a span is part of: neighbours up to what does not fuse."""
        while start > 0 and self._symbols[self.numbers[start - 1]].kind is not Kind.OTHER:
            start -= 1
        end = len(self.numbers)
        while stop < end and self._symbols[self.numbers[stop]].kind is not Kind.OTHER:
            stop += 1
        return start, stop

    def _read_by(self, number: int) -> tuple[set[int], set[int]]:
        """Return the views through which a symbol reads, and the symbols that make what they view."""
        views: set[int] = set()
        makers: set[int] = set()
        stack = [number]
        while stack:
            for proxy in self._symbols[stack.pop()].bsym.flat_proxy_args:
                maker = self._maker.get(proxy.name)
                if maker is None or maker in views:
                    continue
                if self._symbols[maker].kind is Kind.VIEW:
                    views.add(maker)
                    stack.append(maker)
                else:
                    makers.add(maker)
        return views, makers

    def _may_pass(self, between: Sequence[int]) -> bool:
        """Return whether all of these symbols may be passed, and some do not fuse."""
        if len(between) > _FARTHEST:
            return False
        passed = [self._symbols[n] for n in between]
        return any(p.kind is Kind.OTHER for p in passed) and all(p.may_be_passed for p in passed)

    def _writes_over(self, number: int, other: int) -> bool:
        """Return whether a symbol writes over what another one reads, which must then come before it."""
        bsym = self._symbols[number].bsym
        base = updated_name(bsym) if updates_parameter(bsym) else self._symbols[number].base
        return bool(base) and bool(self._memory.storages([base]) & self._memory.uses(other))

    def _is_reordered(self, start: int, numbers: Sequence[int]) -> bool:
        """Take another order of a span, if kernels move less and no moment holds more than the most that ever was."""
        stop = start + len(numbers)
        first, last = self._window(start, stop)
        before = self.numbers[first:last]
        after = [*self.numbers[first:start], *numbers, *self.numbers[stop:last]]
        if self._moved.of(after) >= self._moved.of(before):
            return False
        if self._before[start] + self._memory.held(numbers, self._last, stop)[0] > self._most:
            return False
        self.numbers[start:stop] = numbers
        for place in range(start, stop):
            self._place[self.numbers[place]] = place
        for place in range(start, stop):
            for storage in self._memory.uses(self.numbers[place]):
                if self._last[storage] < stop:
                    self._last[storage] = place
        live = self._before[start]
        for place in range(start, stop):
            self._before[place] = live
            live += self._memory.held([self.numbers[place]], self._last, place + 1)[1]
        return True


class _MovedBytes:
    """Adds up what kernels move, and could while they start, if all neighbours that fuse are one."""

    def __init__(self, symbols: Sequence[Placed], values: Values) -> None:
        self._is_other = [placed.kind is Kind.OTHER for placed in symbols]
        self._fuses = [placed.kind is Kind.FUSES for placed in symbols]
        self._values = values
        self._read: list[set[int]] = []
        """Storages, by number: none of views."""
        self._made: list[set[int]] = []
        self._readers: dict[int, set[int]] = defaultdict(set)
        """Numbers, by storage."""
        for number, placed in enumerate(symbols):
            bsym, is_view = placed.bsym, placed.kind is Kind.VIEW
            self._read.append(set() if is_view else self._storages(bsym.flat_proxy_args))
            self._made.append(set() if is_view else self._storages(bsym.flat_proxy_outs))
            for storage in self._read[-1]:
                self._readers[storage].add(number)

    def of(self, numbers: Sequence[int]) -> int:
        """Return the bytes of the symbols that fuse, in this order."""
        total, run = 0, list[int]()
        for number in numbers:
            if self._is_other[number]:
                total += self._of_run(run)
                run = []
            else:
                run.append(number)
        return total + self._of_run(run)

    def _of_run(self, run: Sequence[int]) -> int:
        if not any(self._fuses[number] for number in run):
            return 0
        made = {s for number in run for s in self._made[number]}
        read = {s for number in run for s in self._read[number]} - made
        written = [s for s in made if not self._readers[s].issubset(run)]
        return _OF_A_KERNEL + sum(self._values.storages[s].nbytes for s in (*read, *written))

    def _storages(self, proxies: Sequence[Proxy]) -> set[int]:
        found = (self._values.by_name.get(proxy.name) for proxy in proxies)
        return {value.storage for value in found if value is not None}
