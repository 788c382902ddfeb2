"""Chooses whose states of optimizers go to the host: those of all parameters of some shapes.

Layers are alike, so each sends the same part of its states, and the copies are spread over all of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch

from thunder_memsave.optim.on_host import Kind
from thunder_memsave.planner.graph import StepMemory

_MOST_KINDS = 12
"""Kinds of which all combinations are looked at, those with the most bytes."""
_AT_ONCE = 3
"""Parameters whose states are on the device at once while their copies overlap."""


@dataclass(frozen=True, slots=True)
class States:
    """The states of a step's optimizers, which may be kept on the host."""

    memory: Callable[[Sequence[Kind]], StepMemory]
    """Returns what a step holds besides if those of the parameters of some kinds are; raises ConfigError if an
    optimizer's cannot be."""
    move: Callable[[Sequence[Kind]], None]
    """Keeps them there from now on."""
    kinds: Callable[[], Mapping[Kind, int]]
    """Returns how many parameters of each kind have states that are not there."""

    def sizes(self, before: StepMemory) -> Mapping[Kind, StatesSize]:
        """Return about the bytes of the states of each kind that are not there; `before`: of a step as they are now.

        Raises:
            ConfigError: they cannot be there.
        """
        kinds = self.kinds()
        if not kinds:
            return {}
        more_bytes = self.memory(tuple(kinds)).host_bytes - before.host_bytes
        total = sum(num * _bytes_of_one(kind) for kind, num in kinds.items())
        each = {kind: more_bytes * _bytes_of_one(kind) // (total or 1) for kind in kinds}
        return {kind: StatesSize(each[kind], num) for kind, num in kinds.items() if each[kind]}


@dataclass(frozen=True, slots=True)
class StatesSize:
    """What the states of the parameters of one kind take."""

    of_one: int
    """Bytes of one parameter's."""
    num: int
    """Number of parameters."""

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.of_one * self.num


def fewest(
    sizes: Mapping[Kind, StatesSize], least_bytes: float, *, most_bytes: float
) -> tuple[Kind, ...]:
    """Return the kinds that have the fewest bytes of all that free so many; the most that may go, if none do.

    Where they can, they free what copies take besides: one parameter's states are copied in, the next ones' are updated
    and the last ones' copied out, all at once.

    Args:
        sizes: Of each kind.
        least_bytes: What they are to free.
        most_bytes: What they may take of the host.

    Returns:
        Kinds in order; none, if none may go.
    """
    if bytes_of(sizes, sizes) <= min(least_bytes, most_bytes):
        return tuple(sorted(sizes))
    largest = sorted(sizes, key=lambda kind: (-sizes[kind].nbytes, kind))[:_MOST_KINDS]
    combined = (some for num in range(len(largest)) for some in combinations(largest, num + 1))
    parts = {some: nbytes for some in combined if (nbytes := bytes_of(sizes, some)) <= most_bytes}
    if bytes_of(sizes, largest) < bytes_of(sizes, sizes) <= most_bytes:
        parts[tuple(sizes)] = bytes_of(sizes, sizes)
    for at_once in (_AT_ONCE, 0):
        free = [some for some in parts if _freed(sizes, some, at_once) >= least_bytes]
        if free:
            found = min(free, key=lambda some: (parts[some], some))
            return tuple(sorted(found))
    found = max(parts, key=lambda some: (parts[some], some), default=())
    return tuple(sorted(found))


def bytes_of(sizes: Mapping[Kind, StatesSize], kinds: Iterable[Kind]) -> int:
    """Return the bytes of the states of some kinds."""
    return sum(sizes[kind].nbytes for kind in kinds)


def _freed(sizes: Mapping[Kind, StatesSize], kinds: Sequence[Kind], at_once: int) -> int:
    return bytes_of(sizes, kinds) - at_once * max(sizes[kind].of_one for kind in kinds)


def _bytes_of_one(kind: Kind) -> int:
    """Return the bytes of one parameter."""
    shape, dtype = kind
    return prod(shape) * int(getattr(torch, dtype.removeprefix("torch.")).itemsize)
