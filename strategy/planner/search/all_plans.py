"""Tries all plans of a graph with few decisions, the most promising first, until the best is proven."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thunder_memsave.planner.effort import FEW_DECISIONS
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.search.evaluate import Evaluated
from thunder_memsave.planner.search.task import Task


def has_few_decisions(model: Model) -> bool:
    """Tell whether all plans can be tried."""
    return len(model.needs.storages) - len(model.pinned) <= FEW_DECISIONS


def fastest_of_all(task: Task) -> Evaluated | None:
    """Return the fastest plan that fits; None if there is none."""
    plans = _all_plans(task.model)
    fitting = plans.least_bytes <= task.budget_bytes
    for number in np.argsort(plans.us, kind="stable"):
        if fitting[number] and task.evaluate(plans.keep(number)).peak_bytes <= task.budget_bytes:
            return task.best
    return None


def smallest_of_all(task: Task) -> Evaluated:
    """Return the plan with the smallest peak."""
    plans = _all_plans(task.model)
    for number in np.argsort(plans.least_bytes, kind="stable"):
        if plans.least_bytes[number] >= task.smallest.peak_bytes:
            break
        task.evaluate(plans.keep(number))
    return task.smallest


@dataclass(frozen=True)
class _Plans:
    """All plans that differ, by numbers whose bits say which storages are kept."""

    model: Model
    decided: tuple[int, ...]
    numbers: np.ndarray
    us: np.ndarray
    least_bytes: np.ndarray
    """Bytes live between forward and backward, which the peak is not below."""

    def keep(self, index: int) -> frozenset[int]:
        number = int(self.numbers[index])
        kept = {s for bit, s in enumerate(self.decided) if number >> bit & 1}
        return frozenset(kept | {s for s, is_kept in self.model.pinned.items() if is_kept})


def _all_plans(model: Model) -> _Plans:
    needs = model.needs
    decided = tuple(s for s in needs.storages if s not in needs.must_keep | model.pinned.keys())
    numbers = np.arange(1 << len(decided))
    kept = {s: numbers >> bit & 1 == 1 for bit, s in enumerate(decided)}
    always = {s: np.full(len(numbers), model.pinned.get(s, True)) for s in needs.storages}
    kept, needed = always | kept, {s: np.full(len(numbers), s in needs.first) for s in always}
    us, same = np.zeros(len(numbers)), np.zeros(len(numbers), dtype=numbers.dtype)
    nbytes = np.full(len(numbers), model.always_live.forward[-1])
    for op in reversed(needs.ops):
        again = np.logical_or.reduce([needed[s] & ~kept[s] for s in needs.makes[op]])
        us += again * model.costs_us[op]
        for storage in needs.inputs[op]:
            needed[storage] |= again
    for bit, storage in enumerate(decided):
        same |= (kept[storage] & needed[storage]).astype(numbers.dtype) << bit
    for storage in needs.storages:
        if storage in model.offloaded:
            continue
        nbytes += (kept[storage] & needed[storage]) * needs.graph.storages[storage].nbytes
    different = np.unique(same, return_index=True)[1]
    return _Plans(model, decided, numbers[different], us[different], nbytes[different])
