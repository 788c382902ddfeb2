"""The simulated allocator agrees with what was derived by hand from the C++ of PyTorch's allocator."""

from __future__ import annotations

import re

import pytest

from harness.derived_segments import KEPT
from harness.derived_sequences import PLACED, Derived
from thunder_memsave.planner.caching_allocator.allocator import (
    CachingAllocator,
    SimulatedOutOfMemoryError,
)
from thunder_memsave.planner.caching_allocator.blocks import Block

_DERIVED = PLACED + KEPT
_UNITS = {"": 1, "K": 2**10, "M": 2**20}


@pytest.mark.parametrize("derived", _DERIVED, ids=[derived.name for derived in _DERIVED])
def test_what_was_derived_by_hand_is_simulated(derived: Derived) -> None:
    allocator = CachingAllocator(
        derived.settings, limit_bytes=_limit(derived.limit), allowed_bytes=_limit(derived.allowed)
    )
    blocks: dict[str, Block | None] = {}
    allocated, reserved = [], []
    events = derived.events.split(", ")
    if derived.raises:
        last = events.pop()
    for event in events:
        _run(event, allocator, blocks)
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    if derived.raises:
        with pytest.raises(SimulatedOutOfMemoryError):
            _run(last, allocator, blocks)
    assert allocated == [_bytes(text) for text in derived.allocated.split(", ")], derived.line
    assert reserved == [_bytes(text) for text in derived.reserved.split(", ")], derived.line
    assert allocator.segments() == _segments(derived.segments), derived.line
    assert allocator.num_retries == derived.retries, derived.line


def test_at_least_40_sequences_were_derived_and_each_names_a_line() -> None:
    assert len({derived.events + str(derived.settings) for derived in _DERIVED}) >= 40
    assert all(re.match(r"\d{4}\b.*[a-z_]{6}", derived.line) for derived in _DERIVED)


def _run(event: str, allocator: CachingAllocator, blocks: dict[str, Block | None]) -> None:
    if event == "empty":
        allocator.empty_cache()
    elif event.startswith("-"):
        allocator.free(blocks.pop(event[1:]))
    else:
        key, size, *stream = event.split()
        on = int(stream[0].removeprefix("@")) if stream else 0
        blocks[key] = allocator.allocate(_bytes(size), on)


def _segments(text: str) -> tuple[tuple[int, ...], ...]:
    """Return each range's blocks, in bytes, as the simulator lists them: those of free ones below 0."""
    return tuple(tuple(map(_block, part.split())) for part in text.split(" | ") if part)


def _block(text: str) -> int:
    return -_bytes(text[1:-1]) if text.startswith("(") else _bytes(text)


def _limit(text: str | None) -> int | None:
    return None if text is None else _bytes(text)


def _bytes(text: str) -> int:
    """Return the bytes of a sum as in `2M-512`."""
    terms = re.findall(r"([+-]?\d+)([KM]?)", text)
    return sum(int(number) * _UNITS[unit] for number, unit in terms)
