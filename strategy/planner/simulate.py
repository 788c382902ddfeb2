"""Simulates a program: the live bytes on the device at every moment of a training step.

Before an operation, the storages are live that were made and have not died; during it also its own allocations; after
it its results are live, less the storages that die. Memory that the allocator caches, or loses to fragmentation, does
not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from thunder_memsave.planner.graph import Program, StepMemory, Storage, StorageKind

_NOTHING_ELSE = StepMemory()


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Bytes of memory over one training step, including those of `StepMemory`."""

    peak_bytes: int
    """The largest peak of forward, the loss between, backward and update."""
    peak_step: int
    """Index of the step during which the peak is; the first step of backward if it is between forward and backward, the
    number of steps if it is in the optimizer's update."""
    peak_bytes_by_kind: Mapping[StorageKind | str, int]
    """Parts of the peak: storages by kind; the operation's own allocations as `inside`; of `StepMemory` `accumulated`,
    `optimizer` and `other`, in the update `update`, and between forward and backward `loss`, which includes the
    gradients of the outputs."""
    live_bytes: tuple[int, ...]
    """Live bytes before each step, and after the last."""
    step_peak_bytes: tuple[int, ...]
    """Peak bytes during each step."""
    forward_peak_bytes: int
    between_peak_bytes: int
    """Peak while the caller has a loss of its own; 0 for a program without backward, and so are the next two."""
    backward_peak_bytes: int
    update_peak_bytes: int
    """Peak during clipping and the optimizer's update, which come after backward."""


def simulate(program: Program, memory: StepMemory = _NOTHING_ELSE) -> Profile:
    """Simulate a program step by step.

    Args:
        program: The steps. Storages that it has not freed at its end are live while the optimizer updates.
        memory: Bytes that the training step holds besides.

    Returns:
        The profile: exact if the program's allocations and lifetimes are.
    """
    live = list(_live_bytes(program, _constant_bytes(program, memory)))
    during = [
        before + step.op.peak_bytes for before, step in zip(live, program.steps, strict=False)
    ]
    forward, backward = during[: program.num_forward], during[program.num_forward :]
    between = _between_bytes(program, memory, live) if backward else 0
    update = live[-1] + memory.update_peak_bytes if backward else 0
    others = [*during, update if backward else live[-1]]
    is_between = between > max(others)
    peak_step = program.num_forward if is_between else _first_largest(others)
    return Profile(
        peak_bytes=max(between, *others),
        peak_step=peak_step,
        peak_bytes_by_kind=_by_kind_at(program, memory, peak_step, is_between=is_between),
        live_bytes=tuple(live),
        step_peak_bytes=tuple(during),
        forward_peak_bytes=max(forward, default=live[0]),
        between_peak_bytes=between,
        backward_peak_bytes=max(backward, default=0),
        update_peak_bytes=update,
    )


def live_bytes_by_kind(program: Program) -> Mapping[StorageKind, tuple[int, ...]]:
    """Return live bytes before each step and after the last, by kind; kinds that never appear are left out."""
    kinds: tuple[StorageKind, ...] = tuple(sorted({s.kind for s in program.storages}))
    now: dict[StorageKind, int] = dict.fromkeys(kinds, 0)
    rows: dict[StorageKind, list[int]] = {kind: [] for kind in kinds}
    for appeared, died in _changes(program):
        for storage in appeared:
            now[storage.kind] += storage.nbytes
        for storage in died:
            now[storage.kind] -= storage.nbytes
        for kind in kinds:
            rows[kind].append(now[kind])
    return {kind: tuple(row) for kind, row in rows.items() if any(row)}


def _constant_bytes(program: Program, memory: StepMemory) -> int:
    return memory.gradient_bytes + memory.optimizer_bytes + memory.other_bytes


def _between_bytes(program: Program, memory: StepMemory, live: Sequence[int]) -> int:
    """Return the peak while the caller computes and differentiates a loss, which ends with the cotangents."""
    own = sum(program.storages[s].nbytes for s in program.cotangents)
    return live[program.num_forward] - own + max(own, memory.between_bytes)


def _live_bytes(program: Program, constant_bytes: int) -> Iterator[int]:
    live = constant_bytes
    for appeared, died in _changes(program):
        live += sum(s.nbytes for s in appeared) - sum(s.nbytes for s in died)
        yield live


def _changes(program: Program) -> Iterator[tuple[list[Storage], list[Storage]]]:
    """Yield the storages that become live and die before the first step, between each two, and after the last."""
    storages = program.storages
    appeared: Iterable[int] = program.held
    died: Iterable[int] = ()
    for number, step in enumerate(program.steps):
        cotangents = program.cotangents if number == program.num_forward else ()
        yield [storages[s] for s in (*appeared, *cotangents)], [storages[s] for s in died]
        appeared, died = step.makes, step.frees
    yield [storages[s] for s in appeared], [storages[s] for s in died]


def _first_largest(values: list[int]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _by_kind_at(
    program: Program, memory: StepMemory, number: int, *, is_between: bool
) -> Mapping[str, int]:
    """Return bytes by kind at step `number`, its own allocations included, or between forward and backward."""
    parts: dict[str, int] = {
        "accumulated": memory.gradient_bytes,
        "optimizer": memory.optimizer_bytes,
        "other": memory.other_bytes,
    }
    for appeared, died in islice(_changes(program), number + 1):
        for storage in appeared:
            parts[storage.kind] = parts.get(storage.kind, 0) + storage.nbytes
        for storage in died:
            parts[storage.kind] -= storage.nbytes
    if is_between:
        parts.pop("cotangent", None)
        parts["loss"] = memory.between_bytes
    elif number == len(program.steps):
        parts["update"] = memory.update_peak_bytes if program.num_forward < number else 0
    else:
        parts["inside"] = program.steps[number].op.peak_bytes
    return {kind: nbytes for kind, nbytes in parts.items() if nbytes}
