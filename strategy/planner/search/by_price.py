"""Searches plans at a price of memory: the fastest plan if every byte that is kept until the peak costs time.

At one price the best plan is a minimum cut, a linear program whose vertices are integer. The price is raised until the
plan fits by the exact simulation. Equal layers change at the same price, so the last plan that does not fit and the
first that does are mixed: one for the layers before a point, the other for those after it. A price does not see chains
of recomputation through many layers, so anchors are kept: storages through which all of forward passes, all of them or
every second, fourth, ... one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from thunder_memsave.planner.choices import Needs
from thunder_memsave.planner.linear.coverage import add_coverage
from thunder_memsave.planner.linear.peak_program import PeakModel
from thunder_memsave.planner.linear.program import LinearProgram
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator

_MOST_PRICES = 7
_LOWEST, _HIGH = 1e-3, 1e3
_HIGHEST = 1e6
_FAMILIES = (1, 2, 4, 8)


def search_prices(
    model: PeakModel,
    evaluate: Evaluator,
    *,
    free: Evaluated,
    budget_bytes: float,
    deadline_s: float,
) -> None:
    """Evaluate plans that are fast and small; the evaluator remembers them.

    Args:
        model: Provides needs, costs and pins.
        evaluate: Evaluator of the same graph.
        free: The plan of the free wins, which does not fit.
        budget_bytes: Bytes that plans should fit in.
        deadline_s: End of the search by `time.thread_time`: a busy machine does not change the plan.
    """
    points = anchors(model.needs)
    prices = _Prices(model, waits_after=_peak_position(free))
    cuts = [max(model.needs.producer[s] for s in live) for live in points]
    for every in _FAMILIES:
        family = frozenset(s for live in points[::-every] for s in live)
        if time.thread_time() > deadline_s or (every > 1 and len(points) < every):
            return
        fits = evaluate(prices.keep(_HIGHEST, family))
        if fits.peak_bytes > budget_bytes:
            continue
        over, fits = _bisected(prices, evaluate, family, free, fits, budget_bytes, deadline_s)
        mix(evaluate, model.needs, cuts, over, fits, budget_bytes, deadline_s)
        best = evaluate.fastest_within(budget_bytes)
        if best is not None:
            # Storages that backward reads first are live at the peak anyway: the last layers recompute nothing.
            mix(evaluate, model.needs, cuts, free, best, budget_bytes, deadline_s)


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


def _peak_position(found: Evaluated) -> int:
    """Return the position of the peak in backward; -1 if it is in forward."""
    moments = found.live_bytes
    worst = max(moments, key=moments.__getitem__)
    return -1 if worst.phase == "forward" else worst.position


class _Prices:
    """One linear program, solved at several prices."""

    def __init__(self, model: PeakModel, *, waits_after: int) -> None:
        self._model, self._program = model, LinearProgram()
        needs, program = model.needs, self._program
        self._again = {o: program.variable(cost=model.costs_us[o] + 1e-6) for o in needs.ops}
        self._kept = {s: program.variable() for s in needs.storages}
        add_coverage(program, needs, self._kept, self._again)
        self._weights = {
            s: needs.graph.storages[s].nbytes * (needs.waits_until(s) > waits_after)
            for s in needs.storages
        }
        mean_us = sum(model.costs_us[o] for o in needs.ops) / max(1, len(needs.ops))
        self._unit = max(mean_us, 1e-9) / max(1, max(self._weights.values(), default=1))

    def keep(self, price: float, family: frozenset[int]) -> frozenset[int]:
        """Return the storages kept at a price, with these anchors. Prices are relative: 1 is near the middle."""
        needs, pinned = self._model.needs, self._model.pinned
        for storage, variable in self._kept.items():
            must = storage in needs.must_keep and storage in needs.first
            pin = pinned.get(storage)
            is_low = pin or must or (storage in family and pin is None)
            self._program.low[variable] = 1.0 if is_low else 0.0
            self._program.high[variable] = 0.0 if pin is False else 1.0
            self._program.cost[variable] = (price * self._weights[storage] + 1e-3) * self._unit
        values = self._program.solve(relaxed=True).values
        assert values is not None, "keeping everything that can be kept is a solution"
        return frozenset(s for s, v in self._kept.items() if values[v] > 0.5)


def _bisected(
    prices: _Prices,
    evaluate: Evaluator,
    family: frozenset[int],
    over: Evaluated,
    fits: Evaluated,
    budget_bytes: float,
    deadline_s: float,
) -> tuple[Evaluated, Evaluated]:
    """Return the plan at the highest price found whose plan does not fit, and at the lowest whose plan does."""
    low, high = _LOWEST, _HIGH
    for _ in range(_MOST_PRICES):
        if time.thread_time() > deadline_s:
            break
        price = (low * high) ** 0.5
        found = evaluate(prices.keep(price, family))
        if found.peak_bytes <= budget_bytes:
            high, fits = price, found
        else:
            low, over = price, found
    return over, fits


def mix(
    evaluate: Evaluator,
    needs: Needs,
    cuts: Sequence[int],
    over: Evaluated,
    fits: Evaluated,
    budget_bytes: float,
    deadline_s: float,
) -> None:
    """Evaluate plans that follow one plan before a point of forward and the other after it, as far as that fits."""

    def mixed(number: int, *, over_first: bool) -> Evaluated:
        def is_over(storage: int) -> bool:
            return (needs.producer[storage] <= cuts[number]) is over_first

        first = {s for s in over.keep if is_over(s)}
        return evaluate(first | {s for s in fits.keep if not is_over(s)})

    forwards = range(len(cuts))
    _furthest(partial(mixed, over_first=True), forwards, budget_bytes, deadline_s)
    _furthest(partial(mixed, over_first=False), forwards[::-1], budget_bytes, deadline_s)


def _furthest(
    at: Callable[[int], Evaluated], numbers: range, budget_bytes: float, deadline_s: float
) -> None:
    low, high = 0, len(numbers)
    while low < high and time.thread_time() < deadline_s:
        middle = (low + high) // 2
        if at(numbers[middle]).peak_bytes <= budget_bytes:
            low = middle + 1
        else:
            high = middle
