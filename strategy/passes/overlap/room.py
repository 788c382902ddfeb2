"""Room: the bytes that a budget leaves, operation by operation, for collectives that run beside computation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from thunder.core.symbol import BoundSymbol

_UNLIMITED = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a budget leaves where every collective is waited for as soon as it is started.

    By names, for executors that come after the plan may fuse operations, and ranks whose batches have other lengths
    have the same names.
    """

    left_bytes: Mapping[str, int]
    """While an operation runs, by the names of its results; none of it may be taken at one that is not here."""
    start_bytes: Mapping[str, int]
    """The most that a collective takes while it starts, by the names of its results."""

    def without(self, nbytes: int) -> Room:
        """As much less at every operation."""
        return replace(self, left_bytes={k: v - nbytes for k, v in self.left_bytes.items()})


NO_ROOM = Room(left_bytes={}, start_bytes={})


class Left:
    """What is left of the room at each symbol of a trace, while its symbols are placed one after the other."""

    def __init__(
        self, room: Room | None, symbols: Sequence[BoundSymbol], *, for_others_bytes: int
    ) -> None:
        """Nothing is taken yet.

        Args:
            room: None: as much as anything can take.
            symbols: Of the trace, in the order to which `room` belongs.
            for_others_bytes: Left by what `fits`, wherever that is no more than a third.
        """
        self._room = room
        self._position = self._blocked_until = self._blocked_bytes = 0
        if room is not None:
            left = np.array(list(_left_at(room, symbols)), dtype=np.int64)
            self._left = left
            self._for_others = np.where(left >= 3 * for_others_bytes, for_others_bytes, 0)

    def start_bytes(self, future: str, default: int) -> int:
        """The most that a collective takes while it starts."""
        return default if self._room is None else self._room.start_bytes.get(future, default)

    def reach(self, position: int) -> None:
        """The symbol at this position is placed next."""
        self._position = position

    @property
    def now(self) -> int:
        """Bytes that are left while the next symbol runs."""
        return _UNLIMITED if self._room is None else int(self._left[self._position])

    def fits(self, nbytes: int, end: int) -> bool:
        """Whether so many are left from now on, up to the symbol at `end`."""
        if self._room is None:
            return True
        if self._position < self._blocked_until <= end and nbytes >= self._blocked_bytes:
            return False
        here = slice(self._position, end)
        lacks = np.flatnonzero(self._left[here] - self._for_others[here] < nbytes)
        if len(lacks):
            # What is left does not grow, so no more fits until then.
            self._blocked_until = self._position + int(lacks[-1]) + 1
            self._blocked_bytes = nbytes
        return not len(lacks)

    def take(self, nbytes: int, end: int) -> None:
        """Take so many from now on, up to the symbol at `end`."""
        if self._room is not None:
            self._left[self._position : end] -= nbytes


def _left_at(room: Room, symbols: Sequence[BoundSymbol]) -> Iterator[int]:
    """Yield of each symbol what is left; of those that run nothing, as much as before them."""
    known = room.left_bytes
    here = next((known[o.name] for b in symbols for o in b.flat_proxy_outs if o.name in known), 0)
    for bsym in symbols:
        found = [known[o.name] for o in bsym.flat_proxy_outs if o.name in known]
        here = min(found, default=here)
        yield max(here, 0)
