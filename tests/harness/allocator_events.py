"""A sequence of allocations in words, and what is reserved for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from thunder_memsave.planner.caching_allocator.replay import Allocate, EmptyCache, Event, Free
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings

M = 2**20


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Events, and what is reserved after them."""

    name: str
    decided_by: str
    """Functions of torch's source."""
    events: str
    """Words: `a=2M` allocates, `a=2M@1` on stream 1, `-a` frees, `empty` empties the cache."""
    reserved: tuple[int, ...]
    """MiB after each event."""
    segments: tuple[tuple[int, ...], ...] | None = None
    """Bytes of blocks after the last event, those of free ones below 0; None where it runs out of memory."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    limit: int | None = None
    """MiB that the device gives."""
    device: int = 2**20
    """MiB of the device's memory, in use or not."""
    retries: int = 0
    allocated: int | None = None
    """Bytes that are allocated after the last event."""


def events_of(sequence: Sequence) -> list[Event]:
    """Read the words of a sequence."""
    return [event_of(word) for word in sequence.events.split()]


def event_of(word: str) -> Event:
    """Read one word of a sequence."""
    if word == "empty":
        return EmptyCache()
    if word.startswith("-"):
        return Free(word[1:])
    key, _, rest = word.partition("=")
    size, _, stream = rest.partition("@")
    return Allocate(key, _nbytes(size), int(stream or 0))


def _nbytes(text: str) -> int:
    """Read `10M-512`, `10M+1`, `1000`."""
    for sign in "+-":
        if sign in text:
            left, right = text.split(sign)
            return _nbytes(left) + int(f"{sign}{right}")
    return int(text[:-1]) * M if text.endswith("M") else int(text)


def live_after(allocations: Iterable[int]) -> list[int]:
    """Return the live bytes after each of `planner.graph.Allocations`; nothing is freed twice."""
    sizes: list[int] = []
    live = [0]
    for number in allocations:
        if number > 0:
            sizes.append(number)
            live.append(live[-1] + number)
        else:
            freed, sizes[-number - 1] = sizes[-number - 1], 0
            assert freed
            live.append(live[-1] - freed)
    return live
