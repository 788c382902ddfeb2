"""Moves operators beside those with which they fuse, where no moment holds more for it.

    t1 = silu(t0)            t2 = mm(x, w)
    t2 = mm(x, w)     ->     t1 = silu(t0)
    t3 = mul(t1, t2)         t3 = mul(t1, t2)

They move over PyTorch's own operators, and uses of gradients: what communicates, draws or writes keeps its place, and
so do products of matrices among themselves. What reads a weight stays before its update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion.memory import Memory, Placed
from thunder_memsave.fusion.operators import Kind
from thunder_memsave.ops.updated_parameters import updated_name, updates_parameter

_FARTHEST = 64
"""Symbols over which one moves at most: what is so far apart is seldom worth the search."""


def beside(symbols: Sequence[Placed], values: Values) -> list[Placed]:
    """Return the symbols in their new order.

    Args:
        symbols: Of a trace in its final order.
        values: All values of the trace.
    """
    order = _Order(symbols, values)
    for number in reversed(range(len(symbols))):
        if symbols[number].kind is Kind.FUSES:
            _ = order.is_moved_back(number) or order.is_moved_forward(number)
    return [symbols[number] for number in order.numbers]


class _Order:
    """An order of symbols, which have the numbers of their first places."""

    def __init__(self, symbols: Sequence[Placed], values: Values) -> None:
        self._symbols = symbols
        self._memory = Memory(symbols, values)
        self.numbers = list(range(len(symbols)))
        self._place = list(range(len(symbols)))
        """The place of each symbol, by its number."""
        self._readers: dict[str, list[int]] = defaultdict(list)
        self._maker: dict[str, int] = {}
        self._last = dict(self._memory.last)
        """The place of the last use of a storage."""
        for number, placed in enumerate(symbols):
            for proxy in placed.bsym.flat_proxy_args:
                self._readers[proxy.name].append(number)
            for proxy in placed.bsym.flat_proxy_outs:
                self._maker[proxy.name] = number

    def is_moved_back(self, number: int) -> bool:
        """Move a symbol to just before its first reader, if that fuses, and tell whether it was."""
        readers = [
            self._place[r]
            for proxy in self._symbols[number].bsym.flat_proxy_outs
            for r in self._readers[proxy.name]
        ]
        if not readers:
            return False
        start, stop = self._place[number], min(readers)
        if not self._is_worth(stop, range(start + 1, stop)):
            return False
        between = self.numbers[start + 1 : stop]
        if any(self._writes_over(n, number) for n in between):
            return False
        return self._is_reordered(start, [*between, number, self.numbers[stop]])

    def is_moved_forward(self, number: int) -> bool:
        """Move a symbol to just after the last of those that make what it reads, if that fuses.

        The views through which it reads come along.
        """
        views, makers = self._read_by(number)
        if not makers:
            return False
        start, stop = max(makers), self._place[number]
        if not self._is_worth(start, range(start + 1, stop)):
            return False
        between = self.numbers[start + 1 : stop]
        if any(self._writes_over(number, n) for n in between):
            return False
        coming = [n for n in between if n in views]
        rest = [n for n in between if n not in views]
        return self._is_reordered(start, [self.numbers[start], *coming, number, *rest])

    def _read_by(self, number: int) -> tuple[set[int], set[int]]:
        """Return the views through which a symbol reads, and the places of the symbols that make what they view."""
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
                    makers.add(self._place[maker])
        return views, makers

    def _is_worth(self, place: int, between: range) -> bool:
        """Return whether the symbol at a place fuses, and all between may be passed, of which some do not fuse."""
        if len(between) > _FARTHEST or self._symbols[self.numbers[place]].kind is not Kind.FUSES:
            return False
        passed = [self._symbols[self.numbers[p]] for p in between]
        return any(p.kind is Kind.OTHER for p in passed) and all(p.may_be_passed for p in passed)

    def _writes_over(self, number: int, other: int) -> bool:
        """Return whether a symbol writes over what another one reads, which must then come before it."""
        bsym = self._symbols[number].bsym
        base = updated_name(bsym) if updates_parameter(bsym) else self._symbols[number].base
        return bool(base) and bool(self._memory.storages([base]) & self._memory.uses(other))

    def _is_reordered(self, start: int, numbers: Sequence[int]) -> bool:
        """Take another order of a span, if no moment of it holds more than the most that was held."""
        stop = start + len(numbers)
        orders = (numbers, self.numbers[start:stop])
        most, most_before = (self._memory.held(order, self._last, stop)[0] for order in orders)
        if most > most_before:
            return False
        self.numbers[start:stop] = numbers
        for place in range(start, stop):
            self._place[self.numbers[place]] = place
        for place in range(start, stop):
            for storage in self._memory.uses(self.numbers[place]):
                if self._last[storage] < stop:
                    self._last[storage] = place
        return True
