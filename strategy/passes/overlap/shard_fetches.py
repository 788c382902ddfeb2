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


@dataclass(frozen=True, slots=True)
class _Fetch:
    bsym: BoundSymbol
    shard: str
    """Name of what is gathered."""
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
        self._fetch_of = {f.shard: f for f in _fetches(symbols, casts)}
        self._waiting = deque(self._fetch_of.values())
        self._begun: set[str] = set()
        self._ahead_bytes = 0

    def bytes_to_come(self, gather: BoundSymbol) -> int:
        """Return the bytes that a gather's own copy takes if it has not begun; 0 without a copy."""
        fetch = self._fetch_of.get(gather.args[0].name)
        return 0 if fetch is None or fetch.shard in self._begun else fetch.num_bytes

    def begin_early(self) -> Iterator[BoundSymbol]:
        """Begin the next copies that the window and the budget have room for."""
        while self._waiting:
            fetch = self._waiting[0]
            if fetch.shard in self._begun:
                self._waiting.popleft()
                continue
            whole_bytes = (self._ahead_bytes + fetch.num_bytes) * fetch.num_ranks
            if 2 * whole_bytes > self._window_bytes:
                return
            if not self._left.fits(fetch.num_bytes, fetch.end):
                return
            self._left.take(fetch.num_bytes, fetch.end)
            self._begun.add(fetch.shard)
            self._ahead_bytes += fetch.num_bytes
            yield fetch.bsym

    def reach(self, shard: str) -> bool:
        """Say that a shard is gathered now; return whether its copy has begun."""
        fetch = self._fetch_of.get(shard)
        if fetch is None or shard not in self._begun:
            self._begun.add(shard)
            return False
        self._ahead_bytes -= fetch.num_bytes
        return True


def fetches_of_shards(casts: Mapping[str, Sequence[BoundSymbol]]) -> set[str]:
    """Return the names of the copies that fetch shards, by what makes the shards."""
    return {b.output.name for made in casts.values() for b in made if is_fetch(b)}


def _fetches(
    symbols: Sequence[BoundSymbol], casts: Mapping[str, Sequence[BoundSymbol]]
) -> Iterator[_Fetch]:
    """Yield the fetches of shards in the order in which their gathers are waited for."""
    gathers = {b.output.name: b for b in symbols if is_all_gather(b) and b.args[0].name in casts}
    for position, bsym in enumerate(symbols):
        gather = gathers.get(bsym.args[0].name) if is_wait(bsym) else None
        if gather is None:
            continue
        shard = gather.args[0].name
        for fetch in filter(is_fetch, casts[shard]):
            yield _Fetch(
                bsym=fetch,
                shard=shard,
                num_bytes=nbytes_of(fetch.output),
                num_ranks=gather.args[1].size(),
                end=position,
            )
