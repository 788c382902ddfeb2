"""Simulates the memory that PyTorch's allocator reserves on a CUDA device for a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from thunder_memsave.planner.caching_allocator.allocator import (
    CachingAllocator,
    SimulatedOutOfMemoryError,
)
from thunder_memsave.planner.caching_allocator.environment import NotSimulatedError, settings_in
from thunder_memsave.planner.caching_allocator.replay import Replayed, replay
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings
from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.step_events import Inside, training_events

_NEAR_BYTES = 2 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedMemory:
    """Simulated peaks of two training steps in bytes, on a device that does not run out."""

    allocated_bytes: int
    """As `torch.cuda.max_memory_allocated` counts: with what is lost within blocks."""
    reserved_bytes: int
    """As `torch.cuda.max_memory_reserved` counts: with what is lost between blocks."""
    expandable_bytes: int
    """The latter if the allocator's segments are expandable."""


Found = dict[AllocatorSettings, Replayed]
"""What was found of one program and its memory, by settings, so that it is not simulated twice."""


def reserved_memory(
    program: Program,
    memory: StepMemory,
    *,
    environment: Mapping[str, str],
    found: Found | None = None,
) -> ReservedMemory:
    """Simulate two training steps, with each of the two orders of allocations in an operation; return larger peaks.

    Args:
        program: The operations as they run, with a backward.
        memory: What a step holds besides.
        environment: Environment variables, two of which are the allocator's settings.
        found: What is known already; what is simulated is added.

    Raises:
        NotSimulatedError: one of these settings is not simulated.
    """
    settings, known = settings_in(environment), {} if found is None else found
    largest = _largest(program, memory, settings, known)
    expandable = _largest(program, memory, replace(settings, expandable_segments=True), known)
    return ReservedMemory(
        allocated_bytes=largest.peak_allocated_bytes,
        reserved_bytes=largest.peak_reserved_bytes,
        expandable_bytes=expandable.peak_reserved_bytes,
    )


def reserved_bytes(
    program: Program, memory: StepMemory, *, environment: Mapping[str, str], found: Found
) -> int:
    """Return the peak of the reserved bytes alone; arguments and errors are those of `reserved_memory`."""
    return _largest(program, memory, settings_in(environment), found).peak_reserved_bytes


def least_reserved_bytes(
    program: Program,
    memory: StepMemory,
    *,
    environment: Mapping[str, str],
    wanted_bytes: int,
    enough_bytes: int,
) -> int:
    """Return the least limit under which the allocator finds memory by giving back what is cached.

    The limit is one of `torch.cuda.set_per_process_memory_fraction`.

    Args:
        program: As for `reserved_memory`.
        memory: As for `reserved_memory`.
        environment: As for `reserved_memory`.
        wanted_bytes: A limit that is returned if it is enough.
        enough_bytes: The peak of the reserved bytes without a limit.

    Returns:
        Bytes, less than 2 MiB or 1 % above the least.
    """
    settings = settings_in(environment)
    if _finds_memory(program, memory, settings, wanted_bytes):
        return wanted_bytes
    too_few = wanted_bytes
    # What is reserved without a limit may not be enough as one: where a segment grows, a request counts whole.
    while settings.expandable_segments and not _finds_memory(
        program, memory, settings, enough_bytes
    ):
        too_few, enough_bytes = enough_bytes, 2 * enough_bytes
    while enough_bytes - too_few > max(_NEAR_BYTES, enough_bytes // 100):
        middle = (too_few + enough_bytes) // 2
        if _finds_memory(program, memory, settings, middle):
            enough_bytes = middle
        else:
            too_few = middle
    return enough_bytes


def _finds_memory(
    program: Program, memory: StepMemory, settings: AllocatorSettings, limit_bytes: int
) -> bool:
    """Return whether two steps reserve no more than what is allowed, in each order of an operation's allocations."""
    try:
        for inside in get_args(Inside):
            allocator = CachingAllocator(settings, allowed_bytes=limit_bytes)
            replayed = replay(training_events(program, memory, inside=inside), allocator)
            if replayed.peak_reserved_bytes > limit_bytes:
                return False
    except SimulatedOutOfMemoryError:
        return False
    return True


def reserved_or_reason(
    program: Program,
    memory: StepMemory,
    *,
    environment: Mapping[str, str],
    found: Found | None = None,
) -> ReservedMemory | NotSimulatedError:
    """As `reserved_memory`, but return the error about a setting that is not simulated."""
    try:
        return reserved_memory(program, memory, environment=environment, found=found)
    except NotSimulatedError as error:
        return error


def _largest(
    program: Program, memory: StepMemory, settings: AllocatorSettings, found: Found
) -> Replayed:
    if settings not in found:
        runs = [
            replay(training_events(program, memory, inside=inside), CachingAllocator(settings))
            for inside in get_args(Inside)
        ]
        found[settings] = max(runs, key=lambda run: run.peak_reserved_bytes)
    return found[settings]
