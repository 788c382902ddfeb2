"""Plans one block of memory for all that a call makes and frees itself: each storage has a fixed offset in it.

Lifetimes are exact, so offsets can be too, and nothing is lost between blocks but what no arrangement avoids. What is
placed are storages that neither stay nor leave the call, and what operations allocate inside. Finding the smallest
block is NP-hard (dynamic storage allocation, Garey and Johnson 1979, SR2); here several greedy orders are tried, each
with the best fit, and the smallest block wins. No device uses it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thunder_memsave.planner.graph import Program

ALIGNMENT = 512
"""Bytes: of the blocks of PyTorch's CUDA allocator, which kernels may count on."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Memory that is live from one step to another, both included."""

    nbytes: int
    """Rounded up to `ALIGNMENT`."""
    first: int
    last: int
    storage: int = -1
    """-1: it belongs to one operation alone, and has no name."""

    @property
    def num_steps(self) -> int:
        """Return the number of steps in which it is live."""
        return self.last - self.first + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Arena:
    """A block of memory with a place for each lifetime."""

    nbytes: int
    least_bytes: int
    """Peak of the bytes that are live at once: no block is smaller."""
    lifetimes: Sequence[Lifetime]
    offsets: Sequence[int]
    """In the order of `lifetimes`."""

    @property
    def ratio(self) -> float:
        """Return the block's size as a multiple of the peak; 1 for an empty one."""
        return self.nbytes / self.least_bytes if self.least_bytes else 1.0


def lifetimes(program: Program) -> Sequence[Lifetime]:
    """Return the lifetimes of what a call makes and frees: not arguments, outputs, gradients or the caller's."""
    leaving = program.held | program.outputs | program.cotangents
    made: dict[int, int] = {}
    found = []
    for number, step in enumerate(program.steps):
        own_bytes = step.op.peak_bytes - sum(program.storages[s].nbytes for s in step.makes)
        if own_bytes > 0:
            found.append(Lifetime(_aligned(own_bytes), number, number))
        made.update(dict.fromkeys(step.makes, number))
        for storage in step.frees:
            place = program.storages[storage]
            if storage in made and storage not in leaving and place.kind != "gradient":
                nbytes = _aligned(place.nbytes)
                found.append(Lifetime(nbytes, made[storage], number, storage))
    return [each for each in found if each.nbytes]


def plan_arena(found: Sequence[Lifetime], *, most_rounds: int = 16) -> Arena:
    """Place lifetimes: those of two that overlap never share a byte.

    Args:
        found: The lifetimes.
        most_rounds: The most times that the best order is tried again with what lies on top of it placed first.
    """
    least_bytes = _peak_bytes(found)
    orders = [sorted(range(len(found)), key=lambda i: order(found[i])) for order in _ORDERS]
    tried = [(*_placed(found, order), order) for order in orders]
    offsets, nbytes, first = min(tried, key=lambda each: each[1])
    order: Sequence[int] = first
    last_offsets = offsets
    for _ in range(most_rounds):
        if nbytes == least_bytes:
            break
        order = _topmost_first(found, last_offsets, order)
        last_offsets, last_bytes = _placed(found, order)
        if last_bytes < nbytes:
            offsets, nbytes = last_offsets, last_bytes
    return Arena(nbytes=nbytes, least_bytes=least_bytes, lifetimes=found, offsets=offsets)


def _topmost_first(
    found: Sequence[Lifetime], offsets: Sequence[int], order: Sequence[int]
) -> Sequence[int]:
    """Move those that end at the top of the block to the front, so that others must go around them."""
    top = max(offset + each.nbytes for offset, each in zip(offsets, found, strict=True))
    first = {i for i in order if offsets[i] + found[i].nbytes == top}
    return [*(i for i in order if i in first), *(i for i in order if i not in first)]


def _by_size(each: Lifetime) -> tuple[int, ...]:
    return (-each.nbytes, -each.num_steps, each.first)


def _by_area(each: Lifetime) -> tuple[int, ...]:
    return (-each.nbytes * each.num_steps, -each.nbytes, each.first)


def _by_length(each: Lifetime) -> tuple[int, ...]:
    return (-each.num_steps, -each.nbytes, each.first)


def _by_start(each: Lifetime) -> tuple[int, ...]:
    return (each.first, -each.num_steps, -each.nbytes)


_ORDERS: Sequence[Callable[[Lifetime], tuple[int, ...]]] = (
    _by_size,
    _by_area,
    _by_length,
    _by_start,
)


def _placed(found: Sequence[Lifetime], order: Sequence[int]) -> tuple[Sequence[int], int]:
    """Place one after the other, each into the smallest gap that it fits into; return offsets and the block's size."""
    count = len(found)
    first, last = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    start, end = np.zeros(count, np.int64), np.zeros(count, np.int64)
    offsets, top = [0] * count, 0
    for number, index in enumerate(order):
        each = found[index]
        others = np.flatnonzero((first[:number] <= each.last) & (last[:number] >= each.first))
        offset = _best_fit(start[others], end[others], each.nbytes)
        first[number], last[number] = each.first, each.last
        start[number], end[number] = offset, offset + each.nbytes
        offsets[index] = offset
        top = max(top, offset + each.nbytes)
    return offsets, top


def _best_fit(start: NDArray[np.int64], end: NDArray[np.int64], nbytes: int) -> int:
    """Return the offset of the smallest gap between blocks that is large enough; above all of them if none is."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    tops = np.maximum.accumulate(end[order])
    floors = np.concatenate(([0], tops[:-1]))
    gaps = start[order] - floors
    fitting = np.flatnonzero(gaps >= nbytes)
    if not len(fitting):
        return int(tops[-1])
    return int(floors[fitting[np.argmin(gaps[fitting])]])


def _peak_bytes(found: Sequence[Lifetime]) -> int:
    live = peak = 0
    for change in _changes(found):
        live += change
        peak = max(peak, live)
    return peak


def _changes(found: Sequence[Lifetime]) -> Iterator[int]:
    """Yield the changes of the live bytes: at each step what begins, and after it what ends."""
    changes = [(each.first, 0, each.nbytes) for each in found]
    changes += [(each.last, 1, -each.nbytes) for each in found]
    return (nbytes for _, _, nbytes in sorted(changes, key=lambda c: c[:2]))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
