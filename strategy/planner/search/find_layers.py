"""Finds the layers of a model: equal runs of operations of forward, and what of backward reads what each makes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.graph import Op

_FEWEST_BLOCKS = 4
_FEWEST_OPS = 6
_WINDOW = 4
"""So many equal operations in a row suggest how far apart two layers are."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of forward, and the part of backward that reads what it makes first."""

    forward: range
    """Operations."""
    backward: range
    """Positions."""
    inputs: tuple[int, ...]
    """Storages that the block before this one makes and that this one reads."""


def find_blocks(needs: Needs, costs_us: Sequence[float], *, merged: int = 1) -> list[Block]:
    """Cut a graph into what is before the layers, each layer, and what is after them.

    Args:
        needs: Of the graph.
        costs_us: By operation: those of equal layers cost the same.
        merged: How many layers are one block.

    Returns:
        Blocks in the order of forward; none where layers are too few, or backward reads what they make in another
        order than the reverse.
    """
    looks = _numbered(_looks(op, us) for op, us in zip(_forward(needs), costs_us, strict=False))
    period, start, stop = _repetition(looks)
    if period == 0:
        return []
    cuts = _cuts(needs, period, start, stop)[::merged]
    if len(cuts) < _FEWEST_BLOCKS + 1:
        return []
    return _blocks(needs, [0, *cuts, needs.graph.num_forward])


def _forward(needs: Needs) -> Sequence[Op]:
    return needs.graph.ops[: needs.graph.num_forward]


def _looks(op: Op, us: float) -> Hashable:
    return op.symbol, op.key, op.repeat, op.peak_bytes, len(op.arguments), len(op.makes), us


def _numbered(values: Iterable[Hashable]) -> np.ndarray:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(v, len(numbers)) for v in values], dtype=np.int64)


def _repetition(looks: np.ndarray) -> tuple[int, int, int]:
    """The distance at which most operations repeat, and where the repetition begins and ends; 0 if there is none."""
    best = (0, 0, 0)
    for period in sorted(_distances(looks)):
        start, length = _longest_run(looks[:-period] == looks[period:])
        if length >= (_FEWEST_BLOCKS - 1) * period and length + period > best[2] - best[1]:
            best = (period, start, start + length + period)
    return best


def _distances(looks: np.ndarray) -> set[int]:
    seen: dict[Hashable, int] = {}
    found: dict[int, int] = {}
    for end in range(_WINDOW, len(looks) + 1):
        window = tuple(looks[end - _WINDOW : end])
        if window in seen and end - seen[window] >= _FEWEST_OPS:
            distance = end - seen[window]
            found[distance] = found.get(distance, 0) + 1
        seen[window] = end
    usual = sorted(found, key=lambda d: -found[d])[:8]
    # Every second layer may differ, so that parts of it repeat more often than all of it.
    return {multiple * d for d in usual for multiple in (1, 2) if 2 * multiple * d < len(looks)}


def _longest_run(equal: np.ndarray) -> tuple[int, int]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest])


def _cuts(needs: Needs, period: int, start: int, stop: int) -> list[int]:
    """Where the fewest bytes pass from one layer to the next."""
    middle = start + (stop - start) // period // 2 * period
    last = {s: max(needs.readers(s), default=-1) for s in needs.storages}
    width = np.zeros(period + 1, dtype=np.int64)
    for storage in needs.storages:
        made, read = needs.producer[storage] - middle, last[storage] - middle
        if made >= -period:
            width[max(0, min(made + 1, period)) : max(0, min(read + 1, period))] += (
                needs.graph.storages[storage].nbytes
            )
    usable = np.where(width[:period] > 0, width[:period], np.iinfo(np.int64).max)
    return list(range(start + int(np.argmin(usable)), stop + 1, period))


def _blocks(needs: Needs, cuts: Sequence[int]) -> list[Block]:
    bounds = [range(a, b) for a, b in pairwise(cuts)]
    inputs = [_crossing(needs, before, here) for before, here in pairwise([range(0), *bounds])]
    begins = [
        _first_read(needs, here, set(after))
        for here, after in zip(bounds, [*inputs[1:], ()], strict=True)
    ]
    begins[-1] = 0
    inner = begins[1:]
    if any(b is None for b in inner) or any(a <= b for a, b in pairwise(inner)):  # type: ignore[operator]
        return []
    num_backward = len(needs.graph.ops) - needs.graph.num_forward
    # What is made before the layers may be read by all of them; backward of the first layer goes on to the end.
    begins[0] = num_backward
    ends = [num_backward, *begins[:-1]]
    return [
        Block(forward=f, backward=range(b, e), inputs=i)  # type: ignore[arg-type]
        for f, b, e, i in zip(bounds, begins, ends, inputs, strict=True)
    ]


def _crossing(needs: Needs, before: range, here: range) -> tuple[int, ...]:
    return tuple(
        s
        for s in needs.storages
        if needs.producer[s] in before and any(o in here for o in needs.readers(s))
    )


def _first_read(needs: Needs, here: range, passed_on: set[int]) -> int | None:
    reads = [
        needs.first[s] for s in needs.first if needs.producer[s] in here and s not in passed_on
    ]
    return min(reads, default=None)
