"""Room: the bytes that a budget leaves at each operation for collectives that overlap with computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from thunder.core.symbol import BoundSymbol

_UNLIMITED = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The bytes that a budget leaves if every collective is waited for as soon as it starts.

    Keyed by name, because the schedule reorders operations, and because ranks whose batches have other lengths share
    the names.
    """

    left_bytes: Mapping[str, int]
    """Bytes left while an operation runs, by the names of its results; one that is not listed has those before it."""
    start_bytes: Mapping[str, int]
    """Peak bytes of a collective while it starts, by the names of its results."""

    def without(self, nbytes: int) -> Room:
        """Return a room with `nbytes` less at every operation."""
        return replace(self, left_bytes={k: v - nbytes for k, v in self.left_bytes.items()})


NO_ROOM = Room(left_bytes={}, start_bytes={})


class BudgetLeft:
    """The bytes of the room that are left at each symbol of a trace, while its symbols are placed in order."""

    def __init__(
        self, room: Room | None, symbols: Sequence[BoundSymbol], *, for_others_bytes: int
    ) -> None:
        """Start with all of the room.

        Args:
            room: The bytes at each operation; None: unlimited.
            symbols: The trace's symbols, in the order for which `room` was computed.
            for_others_bytes: Bytes that `fits` reserves, wherever they are at most a third of what is left.
        """
        self._room = room
        self._position = self._blocked_until = self._blocked_bytes = 0
        if room is not None:
            self._left = left = left_at(room, symbols)
            self._for_others = np.where(left >= 3 * for_others_bytes, for_others_bytes, 0)

    def start_bytes(self, future: str, default: int) -> int:
        """Return the peak bytes of a collective while it starts."""
        return default if self._room is None else self._room.start_bytes.get(future, default)

    def reach(self, position: int) -> None:
        """Advance to the symbol at this position, which is placed next."""
        self._position = position

    @property
    def now(self) -> int:
        """Bytes left while the next symbol runs."""
        return _UNLIMITED if self._room is None else int(self._left[self._position])

    def fits(self, nbytes: int, end: int) -> bool:
        """Return whether `nbytes` are left from now on, up to the symbol at `end`."""
        if self._room is None:
            return True
        if self._position < self._blocked_until <= end and nbytes >= self._blocked_bytes:
            return False
        here = slice(self._position, end)
        lacks = np.flatnonzero(self._left[here] - self._for_others[here] < nbytes)
        if len(lacks):
            # The bytes left never grow, so nothing as large fits until then.
            self._blocked_until = self._position + int(lacks[-1]) + 1
            self._blocked_bytes = nbytes
        return not len(lacks)

    def take(self, nbytes: int, end: int) -> None:
        """Take `nbytes` from now on, up to the symbol at `end`."""
        if self._room is not None:
            self._left[self._position : end] -= nbytes


def left_at(room: Room, symbols: Sequence[BoundSymbol]) -> NDArray[np.int64]:
    """Return the bytes left at each symbol; one that is not listed has what the one before it has."""
    return np.fromiter(_left_at(room, symbols), dtype=np.int64, count=len(symbols))


def _left_at(room: Room, symbols: Sequence[BoundSymbol]) -> Iterator[int]:
    known = room.left_bytes
    here = next((known[o.name] for b in symbols for o in b.flat_proxy_outs if o.name in known), 0)
    for bsym in symbols:
        found = [known[o.name] for o in bsym.flat_proxy_outs if o.name in known]
        here = min(found, default=here)
        yield max(here, 0)
