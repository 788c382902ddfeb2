"""Begins to copy shards from the host before their gathers, so that a gather seldom waits for its copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from thunder.core.symbol import BoundSymbol

from thunder_memsave.ops.families.collectives import is_all_gather, is_wait
from thunder_memsave.ops.host_copies.weights import is_fetch
from thunder_memsave.passes.overlap.facts import nbytes_of
from thunder_memsave.passes.overlap.room import BudgetLeft


@dataclass(frozen=True, slots=True, eq=False)
class _Fetch:
    bsym: BoundSymbol
    num_bytes: int
    num_ranks: int
    """Number of shards that the gather receives."""
    end: int
    """Position of the symbol that waits for the gather; until then the copy is held."""


class ShardFetches:
    """The fetches of shards that a trace gathers: those that have begun, and those that have not."""

    def __init__(
        self,
        symbols: Sequence[BoundSymbol],
        casts: Mapping[str, Sequence[BoundSymbol]],
        left: BudgetLeft,
        window_bytes: int,
    ) -> None:
        """Find the fetches.

        Args:
            symbols: The symbols of a trace.
            casts: By the names of shards that are gathered: the symbols that make them, a fetch and its wait among
                them where the host has the weight.
            left: What the budget leaves.
            window_bytes: Limit on whole parameters in flight; shards of half of it are fetched ahead.
        """
        self._left, self._window_bytes = left, window_bytes
        self._fetch_of = _fetches(symbols, casts)
        self._waiting = deque(dict.fromkeys(self._fetch_of.values()))
        self._begun: set[_Fetch] = set()
        self._ahead: set[_Fetch] = set()
        """Those that have begun and whose gather has not."""

    def bytes_to_come(self, gather: BoundSymbol) -> int:
        """Return the bytes that a gather's own copy takes if it has not begun; 0 without a copy."""
        fetch = self._fetch_of.get(gather.args[0].name)
        return 0 if fetch is None or fetch in self._begun else fetch.num_bytes

    def begin_early(self) -> Iterator[BoundSymbol]:
        """Begin the next copies that the window and the budget have room for."""
        while self._waiting:
            fetch = self._waiting[0]
            if fetch in self._begun:
                self._waiting.popleft()
                continue
            whole_bytes = sum(f.num_bytes * f.num_ranks for f in (*self._ahead, fetch))
            if 2 * whole_bytes > self._window_bytes:
                return
            if not self._left.fits(fetch.num_bytes, fetch.end):
                return
            self._left.take(fetch.num_bytes, fetch.end)
            self._begun.add(fetch)
            self._ahead.add(fetch)
            yield fetch.bsym

    def reach(self, shard: str) -> None:
        """Say that a shard is gathered now, so that its copy has begun."""
        if (fetch := self._fetch_of.get(shard)) is not None:
            self._begun.add(fetch)
            self._ahead.discard(fetch)


def fetches_of_shards(casts: Mapping[str, Sequence[BoundSymbol]]) -> set[str]:
    """Return the names of the copies that fetch shards, by what makes the shards."""
    return {b.output.name for made in casts.values() for b in made if is_fetch(b)}


def _fetches(
    symbols: Sequence[BoundSymbol], casts: Mapping[str, Sequence[BoundSymbol]]
) -> dict[str, _Fetch]:
    """Return the fetches by the names of the shards, in the order in which the gathers are waited for.

    One fetch may be of two shards: a cast makes numbers and their scales.
    """
    gathers = {b.output.name: b for b in symbols if is_all_gather(b) and b.args[0].name in casts}
    known: dict[str, _Fetch] = {}
    found: dict[str, _Fetch] = {}
    for position, bsym in enumerate(symbols):
        gather = gathers.get(bsym.args[0].name) if is_wait(bsym) else None
        if gather is None:
            continue
        shard = gather.args[0].name
        for fetch in filter(is_fetch, casts[shard]):
            made = _Fetch(
                bsym=fetch,
                num_bytes=nbytes_of(fetch.output),
                num_ranks=gather.args[1].size(),
                end=position,
            )
            found[shard] = known.setdefault(fetch.output.name, made)
    return found
