"""Searches plans step by step: whether results of equal layers are kept changes in all, in one half, or in one of them.

`drop` begins with a plan that keeps much, and `improve` with the fastest that fits, or with the smallest. Steps are
judged by the exact simulation.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from heapq import heappop, heappush

from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.search.evaluate import Evaluated
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.work import Work


def drop(task: Task, work: Work) -> None:
    """Give up storages of the plan that keeps much, until it fits."""
    moves = _moves(task.model)
    _given_up(task, task.start, moves, dict.fromkeys(range(len(moves)), 0.0), work)


def improve(task: Task, work: Work) -> None:
    """Improve the best plan until no step makes it faster; while none fits, make the smallest one smaller.

    When no step helps any more, steps that need too much are taken too, and others undone until the plan fits.
    """
    best, moves = _filled(task, work), _moves(task.model)
    prices = dict.fromkeys(range(len(moves)), 0.0)
    for exchanges in (False, True):
        improved = True
        while improved:
            improved = False
            for number, move in enumerate(moves):
                if work.is_over:
                    return
                found = task.evaluate(_toggled(best.keep, move))
                if exchanges and found.peak_bytes > task.budget_bytes:
                    others = {n: price for n, price in prices.items() if n != number}
                    found = _given_up(task, found, moves, others, work)
                    prices |= others
                if _rank(found, task.budget_bytes) < _rank(best, task.budget_bytes):
                    best, improved = found, True


def _given_up(
    task: Task,
    best: Evaluated,
    moves: Sequence[Sequence[int]],
    prices: dict[int, float],
    work: Work,
) -> Evaluated:
    """Give up storages until the plan fits, those first whose bytes above the budget cost the least time.

    As a rule, a step is worth less the more were taken before; so only the best one is looked at again before it is.
    """
    evaluate, over_bytes = task.evaluate, task.budget_bytes
    excess = evaluate.excess_bytes(best.keep, over_bytes=over_bytes)
    queue = sorted((price, number) for number, price in prices.items())
    while queue and excess > 0 and not work.is_over:
        _, number = heappop(queue)
        keep = best.keep - set(moves[number])
        if keep == best.keep:
            continue
        less = excess - evaluate.excess_bytes(keep, over_bytes=over_bytes)
        if less <= 0:
            continue
        found = evaluate(keep)
        prices[number] = price = (found.recompute_us - best.recompute_us) / less
        if queue and (price, number) > queue[0]:
            heappush(queue, (price, number))
        else:
            best, excess = found, excess - less
    return best


def _filled(task: Task, work: Work) -> Evaluated:
    """Keep more storages, the costliest to recompute per byte first, in as many of the last layers as fit."""
    best, model = task.best, task.model
    if best is None:
        return task.smallest
    for group in sorted(alike(model), key=lambda g: _us_per_byte(model, g[0]), reverse=True):
        missing = [s for s in group if s not in best.keep]
        low, high = 0, len(missing)
        while low < high and not work.is_over:
            count = (low + high + 1) // 2
            found = task.evaluate(best.keep | set(missing[-count:]))
            low, high = (count, high) if found.peak_bytes <= task.budget_bytes else (low, count - 1)
        best = task.best or best
    return best


def _us_per_byte(model: Model, storage: int) -> float:
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


def alike(model: Model) -> list[list[int]]:
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


def _moves(model: Model) -> list[Sequence[int]]:
    """Return groups of storages to keep or to recompute together, the largest first, and then each storage alone."""
    groups = alike(model)
    alone = ([s] for group in groups if len(group) > 1 for s in group)
    return [*(part for group in groups for part in _with_halves(group)), *alone]


def _with_halves(group: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the whole group, its earlier half and its later half."""
    yield group
    middle = len(group) // 2
    if middle:
        yield group[:middle]
        yield group[middle:]
