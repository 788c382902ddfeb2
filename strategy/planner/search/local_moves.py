"""Improves a plan step by step: what equal layers make is kept, or no longer kept, in all of them or in one half.

A step is taken when the exact simulation says that the plan fits and is faster; or, while no plan fits, that it needs
less memory.
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
    """Start from the best plan that is known, and stop when no step improves it, or at the deadline."""
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
    """Start from the smallest plan that is known, and lower what it needs beyond a target a little below its peak.

    Many moments need as much as the peak, and a step seldom lowers all of them: the peak alone says nothing of it.
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
    """Keep more of what takes the most time for its bytes, in as many layers as fit, the last ones first."""
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
    """Less is better."""
    if found.peak_bytes <= budget_bytes:
        return False, found.recompute_us, found.peak_bytes
    return True, found.peak_bytes, found.recompute_us


def _toggled(keep: frozenset[int], group: Sequence[int]) -> frozenset[int]:
    is_kept = 2 * sum(s in keep for s in group) > len(group)
    return keep - set(group) if is_kept else keep | set(group)


def alike(model: PeakModel) -> list[list[int]]:
    """Storages that equal operations make, read from equal ones; those with most bytes first."""
    needs = model.needs
    groups: dict[Hashable, list[int]] = {}
    for storage in needs.storages:
        if storage not in needs.must_keep and storage not in model.pinned:
            groups.setdefault(_looks(needs, storage), []).append(storage)
    storages = needs.graph.storages
    return sorted(groups.values(), key=lambda g: -sum(storages[s].nbytes for s in g))


def _looks(needs: Needs, storage: int) -> Hashable:
    op = needs.producer[storage]
    inputs = tuple(_looks_alone(needs, s) for s in needs.inputs.get(op, ()))
    readers = tuple(needs.graph.ops[o].symbol for o in needs.readers(storage))
    return _looks_alone(needs, storage), inputs, readers


def _looks_alone(needs: Needs, storage: int) -> Hashable:
    op = needs.graph.ops[needs.producer[storage]]
    position = op.makes.index(storage)
    return op.symbol, op.key, position, needs.graph.storages[storage].nbytes


def _with_halves(group: Sequence[int]) -> Iterator[Sequence[int]]:
    """All, the earlier layers', and the later ones'."""
    yield group
    middle = len(group) // 2
    if middle:
        yield group[:middle]
        yield group[middle:]
