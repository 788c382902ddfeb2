"""Improves a plan step by step: toggles whether a result of equal layers is kept, in all of them or in one half.

A step is taken if, by the exact simulation, the plan fits and is faster; or, while no plan fits, needs less memory.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence

from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.linear.peak_program import PeakModel
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator

_MOST_SHRINKS = 12
_TARGET = 0.97


def improve(
    model: PeakModel, evaluate: Evaluator, *, budget_bytes: float, deadline_s: float
) -> None:
    """Improve the best known plan until no step makes it better, or until the deadline."""
    best = _filled(model, evaluate, budget_bytes, deadline_s)
    groups = [g for group in alike(model) for g in _with_halves(group)]
    improved = True
    while improved:
        improved = False
        for group in groups:
            if time.thread_time() > deadline_s:
                return
            found = evaluate(_toggled(best.keep, group))
            if _rank(found, budget_bytes) < _rank(best, budget_bytes):
                best, improved = found, True


def shrink(
    model: PeakModel, evaluate: Evaluator, *, enough_bytes: float, deadline_s: float
) -> None:
    """Shrink the smallest known plan: lower its bytes above a target a little below its peak, summed over all moments.

    Many moments are as high as the peak, and a step seldom lowers all of them: the peak alone would show no progress.
    """
    groups = [g for group in alike(model) for g in _with_halves(group)]
    moves = [*groups, *([s] for group in alike(model) if len(group) > 1 for s in group)]
    best = evaluate.smallest
    for _ in range(_MOST_SHRINKS):
        before = best
        target_bytes = _TARGET * best.peak_bytes
        excess = evaluate.excess_bytes(best.keep, over_bytes=target_bytes)
        for move in moves:
            for keep in (best.keep - set(move), best.keep | set(move)):
                if time.thread_time() > deadline_s or evaluate.smallest.peak_bytes <= enough_bytes:
                    return
                if keep == best.keep:
                    continue
                now = evaluate.excess_bytes(keep, over_bytes=target_bytes)
                if now < excess:
                    best, excess = evaluate(keep), now
        if best is before:
            return


def _filled(
    model: PeakModel, evaluate: Evaluator, budget_bytes: float, deadline_s: float
) -> Evaluated:
    """Keep more storages, the costliest to recompute per byte first, in as many of the last layers as fit."""
    best = evaluate.fastest_within(budget_bytes)
    if best is None:
        return evaluate.smallest
    for group in sorted(alike(model), key=lambda g: _us_per_byte(model, g[0]), reverse=True):
        missing = [s for s in group if s not in best.keep]
        low, high = 0, len(missing)
        while low < high and time.thread_time() < deadline_s:
            count = (low + high + 1) // 2
            found = evaluate(best.keep | set(missing[-count:]))
            low, high = (count, high) if found.peak_bytes <= budget_bytes else (low, count - 1)
        best = evaluate.fastest_within(budget_bytes) or best
    return best


def _us_per_byte(model: PeakModel, storage: int) -> float:
    op = model.needs.producer[storage]
    return model.costs_us[op] / max(1, model.needs.graph.storages[storage].nbytes)


def _rank(found: Evaluated, budget_bytes: float) -> tuple[bool, float, float]:
    """Return a sort key: the smaller, the better the plan."""
    if found.peak_bytes <= budget_bytes:
        return False, found.recompute_us, found.peak_bytes
    return True, found.peak_bytes, found.recompute_us


def _toggled(keep: frozenset[int], group: Sequence[int]) -> frozenset[int]:
    is_kept = 2 * sum(s in keep for s in group) > len(group)
    return keep - set(group) if is_kept else keep | set(group)


def alike(model: PeakModel) -> list[list[int]]:
    """Group storages that equal operations make from equal inputs, those with the most bytes first."""
    needs = model.needs
    groups: dict[Hashable, list[int]] = {}
    for storage in needs.storages:
        if storage not in needs.must_keep and storage not in model.pinned:
            groups.setdefault(_signature(needs, storage), []).append(storage)
    storages = needs.graph.storages
    return sorted(groups.values(), key=lambda g: -sum(storages[s].nbytes for s in g))


def _signature(needs: Needs, storage: int) -> Hashable:
    op = needs.producer[storage]
    inputs = tuple(_producer_signature(needs, s) for s in needs.inputs.get(op, ()))
    readers = tuple(needs.graph.ops[o].symbol for o in needs.readers(storage))
    return _producer_signature(needs, storage), inputs, readers


def _producer_signature(needs: Needs, storage: int) -> Hashable:
    op = needs.graph.ops[needs.producer[storage]]
    position = op.makes.index(storage)
    return op.symbol, op.key, position, needs.graph.storages[storage].nbytes


def _with_halves(group: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the whole group, its earlier half and its later half."""
    yield group
    middle = len(group) // 2
    if middle:
        yield group[:middle]
        yield group[middle:]
