"""Moves operators beside those with which they fuse, where no moment holds more for it.

    t1 = silu(t0)            t2 = mm(x, w)
    t2 = mm(x, w)     ->     t1 = silu(t0)
    t3 = mul(t1, t2)         t3 = mul(t1, t2)

They move over PyTorch's own operators alone: what communicates, draws or writes keeps its place, and so do products of
matrices among themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol

from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion.operators import Kind


@dataclass(frozen=True, slots=True)
class Placed:
    """A symbol, and what moving it or others over it asks."""

    bsym: BoundSymbol
    kind: Kind
    may_be_passed: bool = False
    """Whether an operator that fuses may move over it."""
    peak_bytes: int = 0
    """The most that it allocates, its results among them."""


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
        self._symbols, self._values = symbols, values
        self.numbers = list(range(len(symbols)))
        self._place = list(range(len(symbols)))
        """By number."""
        self._readers: dict[str, list[int]] = defaultdict(list)
        self._maker: dict[str, int] = {}
        self._users: dict[int, list[int]] = defaultdict(list)
        """Who makes or reads a storage."""
        for number, placed in enumerate(symbols):
            for proxy in placed.bsym.flat_proxy_args:
                self._readers[proxy.name].append(number)
            for proxy in placed.bsym.flat_proxy_outs:
                self._maker[proxy.name] = number
            for storage in self._storages(number):
                self._users[storage].append(number)

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
        return self._is_reordered(start, stop + 1, [*between, number, self.numbers[stop]])

    def is_moved_forward(self, number: int) -> bool:
        """Move a symbol to just after the last of those that make what it reads, if that fuses."""
        makers = [
            self._place[self._maker[proxy.name]]
            for proxy in self._symbols[number].bsym.flat_proxy_args
            if proxy.name in self._maker
        ]
        if not makers:
            return False
        start, stop = max(makers), self._place[number]
        if not self._is_worth(start, range(start + 1, stop)):
            return False
        between = self.numbers[start + 1 : stop]
        return self._is_reordered(start, stop + 1, [self.numbers[start], number, *between])

    def _is_worth(self, place: int, between: Iterable[int]) -> bool:
        """Return whether the symbol at a place fuses, and all between may be passed, of which some do not fuse."""
        if self._symbols[self.numbers[place]].kind is not Kind.FUSES:
            return False
        passed = [self._symbols[self.numbers[p]] for p in between]
        return any(p.kind is Kind.OTHER for p in passed) and all(p.may_be_passed for p in passed)

    def _is_reordered(self, start: int, stop: int, numbers: list[int]) -> bool:
        """Take another order of a span, if no moment of it holds more than the most that was held."""
        if self._most(numbers, stop) > self._most(self.numbers[start:stop], stop):
            return False
        self.numbers[start:stop] = numbers
        for place in range(start, stop):
            self._place[self.numbers[place]] = place
        return True

    def _most(self, numbers: Sequence[int], stop: int) -> int:
        """Return the most bytes that a span, which ends before `stop`, holds beside what it finds."""
        last = {s: n for n in numbers for s in self._storages(n) if self._dies_before(s, stop)}
        live = most = 0
        for number in numbers:
            most = max(most, live + self._symbols[number].peak_bytes)
            made = {self._storage(p.name) for p in self._symbols[number].bsym.flat_proxy_outs}
            new = {s for s in made if s is not None and self._users[s][0] == number}
            live += sum(self._values.storages[s].nbytes for s in new)
            gone = [s for s in self._storages(number) if last.get(s) == number]
            live -= sum(self._values.storages[s].nbytes for s in gone)
        return most

    def _dies_before(self, storage: int, stop: int) -> bool:
        if storage in self._values.inputs:
            return False
        return max(self._place[u] for u in self._users[storage]) < stop

    def _storages(self, number: int) -> set[int]:
        bsym = self._symbols[number].bsym
        names = (p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs))
        return {s for n in names if (s := self._storage(n)) is not None}

    def _storage(self, name: str) -> int | None:
        value = self._values.by_name.get(name)
        return None if value is None else value.storage
