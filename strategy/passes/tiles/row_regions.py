"""Finds the operators around values of tokens that are wider than what goes in and out, such as those of an MLP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_memsave.passes.symbols import forward_symbols
from thunder_memsave.passes.tiles.row_kinds import RowKinds


@dataclass(frozen=True, slots=True)
class RowRegion:
    """Operators that read or make wide values which nothing else reads. Symbols are in the trace's order."""

    forward: tuple[BoundSymbol, ...]
    backward: tuple[BoundSymbol, ...]
    wide: frozenset[str]
    """Names of the wide values."""
    nbytes: int
    """Bytes of the wide values, without views."""


def row_regions(symbols: Sequence[BoundSymbol], rows: RowKinds) -> list[RowRegion]:
    """Return regions of one width: that for which their values have the most bytes.

    Args:
        symbols: Of a joint trace.
        rows: What is known of it.
    """
    forward = forward_symbols(symbols)
    touched = [each for b in symbols if (each := _Touched.of(b, rows)).widest]
    widths = {w for each in touched for w in each.made.values()} - {0}
    found = [list(_wider_than(w, touched, rows, forward)) for w in sorted(widths)]
    return max(found, key=lambda regions: sum(r.nbytes for r in regions), default=[])


@dataclass(frozen=True, slots=True)
class _Touched:
    """A symbol with the widths of the values that it reads and makes, by their names."""

    bsym: BoundSymbol
    read: Mapping[str, int]
    made: Mapping[str, int]
    widest: int

    @classmethod
    def of(cls, bsym: BoundSymbol, rows: RowKinds) -> _Touched:
        proxies = _tensors(bsym.flat_proxy_args), _tensors(bsym.flat_proxy_outs)
        read, made = ({p.name: rows.width(p) for p in each} for each in proxies)
        return cls(bsym, read, made, max((*read.values(), *made.values()), default=0))


def _wider_than(
    width: int, touched: Sequence[_Touched], rows: RowKinds, forward: set[int]
) -> Iterator[RowRegion]:
    parts = _Parts()
    refused: set[str] = set()
    touching: list[tuple[BoundSymbol, str]] = []
    for each in touched:
        if each.widest <= width:
            continue
        wide = [n for widths in (each.read, each.made) for n, w in widths.items() if w > width]
        parts.join(wide)
        touching.append((each.bsym, wide[0]))
        if id(each.bsym) not in rows.row_wise:
            refused.add(wide[0])
    roots = {parts.root(name) for name in refused}
    members: dict[str, list[BoundSymbol]] = defaultdict(list)
    for bsym, name in touching:
        if (root := parts.root(name)) not in roots:
            members[root].append(bsym)
    for found in members.values():
        region = _region(found, width, rows, forward)
        if region.forward and region.backward:
            yield region


def _region(
    members: Sequence[BoundSymbol], width: int, rows: RowKinds, forward: set[int]
) -> RowRegion:
    made = {o.name: (o, b) for b in members for o in _tensors(b.flat_proxy_outs)}
    wide = {name: pair for name, pair in made.items() if rows.width(pair[0]) > width}
    return RowRegion(
        forward=tuple(b for b in members if id(b) in forward),
        backward=tuple(b for b in members if id(b) not in forward),
        wide=frozenset(wide),
        nbytes=sum(
            int(o.numel) * int(o.dtype.bytes)
            for o, b in wide.values()
            if rows.row_wise[id(b)].view is None
        ),
    )


def _tensors(proxies: Sequence[object]) -> list[TensorProxy]:
    return [p for p in proxies if isinstance(p, TensorProxy)]


class _Parts:
    """Sets of names that are joined."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def root(self, name: str) -> str:
        """Return the one name that stands for the set of this one."""
        while (parent := self._parent.setdefault(name, name)) != name:
            self._parent[name] = self._parent[parent]
            name = parent
        return name

    def join(self, names: Sequence[str]) -> None:
        """Make the sets of these names one."""
        first = self.root(names[0])
        for name in names[1:]:
            self._parent[self.root(name)] = first
