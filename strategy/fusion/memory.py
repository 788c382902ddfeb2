"""Says what the symbols of a trace take and leave, run one by one, where results are written over operands that die."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from thunder.core.symbol import BoundSymbol

from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion.operators import Kind
from thunder_memsave.passes.in_place.results import written_over


@dataclass(frozen=True, slots=True)
class Placed:
    """A symbol, and what moving it or others over it asks."""

    bsym: BoundSymbol
    kind: Kind
    may_be_passed: bool = False
    """Whether an operator that fuses may move over it."""
    peak_bytes: int = 0
    """The most that it allocates, its results among them."""
    base: str = ""
    """The tensor in whose memory it writes its result; empty: in new memory."""
    is_left_out: bool = False
    """Whether another symbol writes what it would make."""


def with_places(symbols: Sequence[Placed]) -> list[Placed]:
    """Return the symbols of a trace, in their order, with what the pass `write_in_place` will do with them."""
    bases, left_out = written_over([p.bsym for p in symbols])
    return [
        replace(placed, base=bases.get(index, ""), is_left_out=index in left_out)
        for index, placed in enumerate(symbols)
    ]


def readers_of(symbols: Sequence[BoundSymbol]) -> defaultdict[str, list[int]]:
    """Return the indices of the symbols that read each name, in order: once for each time that one reads it."""
    found = defaultdict[str, list[int]](list)
    for index, bsym in enumerate(symbols):
        for proxy in bsym.flat_proxy_args:
            found[proxy.name].append(index)
    return found


def makers_of(symbols: Sequence[BoundSymbol]) -> dict[str, int]:
    """Return the index of the symbol that makes each name."""
    return {o.name: index for index, bsym in enumerate(symbols) for o in bsym.flat_proxy_outs}


class Memory:
    """The storages of symbols, which are numbered; results written over an operand have that one's."""

    def __init__(self, symbols: Sequence[Placed], values: Values) -> None:
        """Follow the symbols.

        Args:
            symbols: By number, in an order in which each follows what it reads.
            values: All values of the trace.
        """
        self._symbols, self._values = symbols, values
        self._storage: dict[int, int] = {}
        """The storage in whose memory another one is."""
        self.absent: set[int] = set()
        """The storages of what is left out: parts that are added where another tensor is."""
        self.read: list[set[int]] = []
        self.made: list[set[int]] = []
        """New memory, by number."""
        self.last: dict[int, int] = {}
        """The number of the symbol that uses a storage last."""
        known = set(values.inputs)
        parts: dict[int, set[int]] = {}
        """The storages that are read where something that is left out would be."""
        for placed in symbols:
            read = self.storages(p.name for p in placed.bsym.flat_proxy_args)
            read = read.union(*(parts[s] for s in read & self.absent))
            if placed.base:
                (base,) = self.storages([placed.base])
                for proxy in placed.bsym.flat_proxy_outs:
                    self._storage[values.by_name[proxy.name].storage] = base
            results = self.storages(p.name for p in placed.bsym.flat_proxy_outs)
            self.read.append(read | (results if placed.base else set()))
            self.made.append({s for s in results - read if s not in known})
            if placed.is_left_out:
                self.absent |= self.made[-1]
                parts.update(dict.fromkeys(self.made[-1], read))
            known.update(read, results)
            self.last.update(dict.fromkeys(self.uses(len(self.made) - 1), len(self.made) - 1))

    def storages(self, names: Iterable[str]) -> set[int]:
        """Return the storages of tensors by their names."""
        found = (self._values.by_name.get(name) for name in names)
        return {self._storage.get(v.storage, v.storage) for v in found if v is not None}

    def uses(self, number: int) -> set[int]:
        """Return the storages that a symbol reads, writes or makes."""
        return self.read[number] | self.made[number]

    def _dies(self, storage: int) -> bool:
        """Return whether a storage is freed after its last use: no argument of the caller, no gradient from it."""
        return (
            storage not in self._values.inputs
            and self._values.storages[storage].kind != "cotangent"
        )

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Return the bytes of storages; what is left out has none."""
        return sum(self._values.storages[s].nbytes for s in storages if s not in self.absent)

    def held_before(self, stop: int) -> tuple[list[int], int]:
        """Return what is held before each of the first symbols, beside what they find, and the most that ever is."""
        before, live, most = [], 0, 0
        for number in range(stop):
            before.append(live)
            of_one, more = self.held([number], self.last, number + 1)
            most = max(most, live + of_one)
            live += more
        return before, most

    def held(self, numbers: Sequence[int], last: Mapping[int, int], stop: int) -> tuple[int, int]:
        """Return the most that symbols hold beside what there was before, and what they leave beside it.

        Args:
            numbers: In the order in which they run.
            last: The place of the last use of each storage.
            stop: The place before which they run: a storage that is used later is not freed.
        """
        freed_by = {
            storage: number
            for number in numbers
            for storage in self.uses(number)
            if last[storage] < stop and self._dies(storage)
        }
        live = most = 0
        for number in numbers:
            placed = self._symbols[number]
            own_bytes = self.bytes_of(self.storages([placed.base])) if placed.base else 0
            if not placed.is_left_out:
                most = max(most, live + placed.peak_bytes - own_bytes)
            gone = (s for s in self.uses(number) if freed_by.get(s) == number)
            live += self.bytes_of(self.made[number]) - self.bytes_of(gone)
        return most, live
