"""The simulated allocator reserves what torch's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.allocator_events import M, Sequence, event_of, events_of
from harness.allocator_sequences import SEQUENCES
from thunder_memsave.planner.caching_allocator.allocator import (
    CachingAllocator,
    SimulatedOutOfMemoryError,
)
from thunder_memsave.planner.caching_allocator.environment import settings_of
from thunder_memsave.planner.caching_allocator.replay import Allocate, EmptyCache, Free, replay

_RECORDED = json.loads(Path(__file__).with_name("recorded_sequences.json").read_text())
_FITTING = [s for s in SEQUENCES if s.segments is not None]
_TOO_LARGE = [s for s in SEQUENCES if s.segments is None]


def allocator_of(sequence: Sequence) -> CachingAllocator:
    limit_bytes = None if sequence.limit is None else sequence.limit * M
    return CachingAllocator(
        sequence.settings, limit_bytes=limit_bytes, device_bytes=sequence.device * M
    )


@pytest.mark.parametrize("sequence", _FITTING, ids=[s.name for s in _FITTING])
def test_segments_are_those_of_torchs_source(sequence: Sequence) -> None:
    allocator = allocator_of(sequence)
    replayed = replay(events_of(sequence), allocator)
    assert replayed.reserved_bytes == tuple(mib * M for mib in sequence.reserved)
    assert allocator.segments() == sequence.segments
    assert replayed.num_retries == sequence.retries
    held = sum(size for segment in allocator.segments() for size in segment if size > 0)
    assert replayed.allocated_bytes[-1] == held
    if sequence.allocated is not None:
        assert held == sequence.allocated


@pytest.mark.parametrize("sequence", _TOO_LARGE, ids=[s.name for s in _TOO_LARGE])
def test_memory_runs_out_where_torchs_does(sequence: Sequence) -> None:
    allocator = allocator_of(sequence)
    *before, last = events_of(sequence)
    assert replay(before, allocator).reserved_bytes == tuple(
        mib * M for mib in sequence.reserved[:-1]
    )
    with pytest.raises(SimulatedOutOfMemoryError, match=r"bytes cannot be allocated: \d+ bytes of"):
        replay([last], allocator)
    assert allocator.reserved_bytes == sequence.reserved[-1] * M
    assert allocator.num_retries == sequence.retries


@pytest.mark.parametrize("recorded", _RECORDED, ids=[r["settings"] for r in _RECORDED])
def test_torchs_own_library_reserved_the_same(recorded: dict[str, Any]) -> None:
    """The bytes are those that `libc10_cuda.so` of torch 2.11.0, 2.13.0 and 2.14.1 gave, all three alike."""
    allocator = CachingAllocator(
        settings_of(recorded["settings"]), limit_bytes=recorded["limit_bytes"]
    )
    blocks: dict[object, Any] = {}
    too_large: list[int] = []
    for number, event in enumerate(map(event_of, recorded["events"].split())):
        if isinstance(event, Free):
            allocator.free(blocks.pop(event.key))
        elif isinstance(event, EmptyCache):
            allocator.empty_cache()
        else:
            try:
                blocks[event.key] = allocator.allocate(event.nbytes, event.stream)
            except SimulatedOutOfMemoryError:
                too_large.append(int(str(event.key)))
        assert allocator.reserved_bytes == recorded["reserved_bytes"][number]
        assert allocator.allocated_bytes == recorded["allocated_bytes"][number]
    assert too_large == recorded["out_of_memory"]
    assert allocator.num_retries == recorded["retries"]


def test_requested_bytes_are_those_before_rounding() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1000)
    assert allocator.requested_bytes == 1000
    assert allocator.allocated_bytes == 1024
    allocator.free(block)
    assert allocator.requested_bytes == 0


def test_peaks_stay_after_everything_is_freed() -> None:
    allocator = CachingAllocator()
    replayed = replay([Allocate("a", 30 * M), Free("a"), EmptyCache()], allocator)
    assert replayed.peak_allocated_bytes == replayed.peak_reserved_bytes == 30 * M
    assert (replayed.allocated_bytes, replayed.reserved_bytes) == (
        (30 * M, 0, 0),
        (30 * M, 30 * M, 0),
    )


def test_memory_that_is_not_allocated_cannot_be_freed() -> None:
    with pytest.raises(KeyError):
        replay([Free("a")], CachingAllocator())
