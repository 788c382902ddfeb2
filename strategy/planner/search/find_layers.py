"""Finds the layers of a model: equal runs of operations of forward, and the part of backward that belongs to each."""

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
"""Number of equal operations in a row whose distance is a candidate for that between two layers."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of forward, and the part of backward in which its results are first read."""

    forward: range
    """Operations of forward."""
    backward: range
    """Positions of backward."""
    inputs: tuple[int, ...]
    """Storages that the block before makes and this one reads."""


def find_blocks(needs: Needs, costs_us: Sequence[float]) -> list[Block]:
    """Cut a graph into the part before the layers, each layer, and the part after them.

    Args:
        needs: Choices of the graph.
        costs_us: Microseconds by operation: equal layers cost the same.

    Returns:
        Blocks in the order of forward; none if there are too few layers, or backward does not read their results in
        reverse order.
    """
    looks = _numbered(_looks(op, us) for op, us in zip(_forward(needs), costs_us, strict=False))
    period, start, stop = _repetition(looks)
    if period == 0:
        return []
    cuts = _cuts(needs, period, start, stop)
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
    """Return the distance at which most operations repeat, and where the repetition begins and ends; 0 if none."""
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
    """Return the operations at which the fewest bytes pass from one layer to the next."""
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
    # All layers may read results from before the layers, so backward of the first layer goes on to the end.
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
