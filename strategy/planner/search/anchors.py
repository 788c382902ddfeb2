"""Finds the points of forward with the fewest live bytes, and mixes two plans at such a point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.search.evaluate import Evaluated
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.work import Work


def anchors(needs: Needs) -> list[tuple[int, ...]]:
    """Return, by the points of forward with the fewest live bytes, the storages that every recomputation passes."""
    last = {s: max((o for o in needs.readers(s)), default=-1) for s in needs.storages}
    alive: dict[int, None] = {}
    widths: list[tuple[int, tuple[int, ...]]] = []
    made = _made_at(needs)
    for op in needs.ops:
        alive.update(dict.fromkeys(made.get(op, ())))
        alive = {s: None for s in alive if last[s] > op}
        widths.append((sum(needs.graph.storages[s].nbytes for s in alive), tuple(alive)))
    return list(_narrow(widths))


def _made_at(needs: Needs) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {}
    for storage in needs.storages:
        made.setdefault(needs.producer[storage], []).append(storage)
    return made


def _narrow(widths: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[tuple[int, ...]]:
    """Yield the storages at local minima of the width, without the wide ones among these."""
    outer = (1 << 62, ())
    around = zip([outer, *widths], widths, [*widths[1:], outer], strict=False)
    found = [here for before, here, after in around if here[1] and before[0] > here[0] <= after[0]]
    usual = sorted(width for width, _ in found)
    for width, live in found:
        if 4 * width <= 5 * usual[len(usual) // 4]:
            yield live


def mix(task: Task, over: Evaluated, fits: Evaluated, work: Work) -> None:
    """Evaluate plans that follow one plan before a point of forward and the other after it, as far as that fits."""
    needs = task.model.needs
    cuts = [max(needs.producer[s] for s in live) for live in anchors(needs)]

    def mixed(number: int, *, over_first: bool) -> Evaluated:
        def is_over(storage: int) -> bool:
            return (needs.producer[storage] <= cuts[number]) is over_first

        first = {s for s in over.keep if is_over(s)}
        return task.evaluate(first | {s for s in fits.keep if not is_over(s)})

    forwards = range(len(cuts))
    _furthest(partial(mixed, over_first=True), forwards, task.budget_bytes, work)
    _furthest(partial(mixed, over_first=False), forwards[::-1], task.budget_bytes, work)


def _furthest(
    at: Callable[[int], Evaluated], numbers: range, budget_bytes: float, work: Work
) -> None:
    low, high = 0, len(numbers)
    while low < high and not work.is_over:
        middle = (low + high) // 2
        if at(numbers[middle]).peak_bytes <= budget_bytes:
            low = middle + 1
        else:
            high = middle
