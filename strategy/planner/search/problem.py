"""Prepares a graph for searches: its choices, the cheap plan, pins, and costs without those of what pins recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from thunder_memsave.planner.actions import Actions
from thunder_memsave.planner.choices import Needs, needs
from thunder_memsave.planner.graph import Plan, StepMemory, TrainingGraph
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.search.anchors import anchors
from thunder_memsave.planner.search.cheap import MOVED_PER_KEPT_BYTE, choose_cheap
from thunder_memsave.planner.search.describe import Description
from thunder_memsave.planner.search.evaluate import Evaluated, Evaluator
from thunder_memsave.planner.search.task import Task

_ANCHORS = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph with its costs and pins."""

    needs: Needs
    cheap: frozenset[int]
    """Storages that a plan keeps which recomputes all that is cheap to recompute from others."""
    all_kept: frozenset[int]
    """Storages that are kept where only what takes no time is recomputed."""
    least: frozenset[int]
    evaluate: Evaluator
    pinned: Mapping[int, bool]
    costs_us: Sequence[float]

    def task(self, budget_bytes: float) -> Task:
        """Return the task of searching plans within a budget."""
        model = Model(
            needs=self.needs,
            costs_us=self.evaluate.costs_us,
            memory=self.evaluate.memory,
            generator_state_bytes=self.evaluate.generator_state_bytes,
            pinned=self.pinned,
            offloaded=self.evaluate.offloaded,
        )
        return Task(
            model=model,
            evaluate=self.evaluate,
            start=self._start(budget_bytes),
            budget_bytes=budget_bytes,
        )

    def _start(self, budget_bytes: float) -> Evaluated:
        """Return the plan that keeps all, or where even what is cheap to recompute is not enough, that without it."""
        cheap = self.evaluate(self.cheap)
        return self.evaluate(self.all_kept) if cheap.peak_bytes <= budget_bytes else cheap

    def remember(self, known: Sequence[Plan]) -> None:
        """Evaluate plans that were found before."""
        storages = self.needs.graph.storages
        for plan in known:
            kept = plan.actions.kept
            self.evaluate(frozenset(s for s in self.needs.storages if storages[s].name in kept))

    def anchored(self) -> Iterator[Evaluated]:
        """Yield plans that keep what must be kept, and none, all, every second, ... of the anchors."""
        points = anchors(self.needs)
        yield self.evaluate(self.least)
        for every in _ANCHORS:
            pinned = {s for s, is_kept in self.pinned.items() if not is_kept}
            kept = {s for live in points[::-every] for s in live} - pinned
            yield self.evaluate(self.least | kept)

    def plan(self, found: Evaluated, budget_bytes: int | None, *, bound_us: float) -> Plan:
        """Return the plan with the reasons for its decisions."""
        storages = self.needs.graph.storages
        described = Description(
            needs=self.needs,
            kept=found.keep,
            cheap=self.cheap,
            pinned=self.pinned,
            costs_us=self.costs_us,
            offloaded=self.evaluate.offloaded,
        )
        here = found.keep - self.evaluate.offloaded
        return Plan(
            actions=described.actions(found.decided),
            budget_bytes=budget_bytes,
            predicted_peak_bytes=found.peak_bytes,
            keep_all_peak_bytes=self.evaluate(self.all_kept).peak_bytes,
            saved_bytes=sum(storages[s].nbytes for s in here),
            offloaded_bytes=sum(storages[s].nbytes for s in found.keep - here),
            recompute_us=found.recompute_us,
            lower_bound_us=min(bound_us, found.recompute_us),
            decisions=tuple(described.decisions()),
            found_by=found.found_by,
        )


def problem_of(
    graph: TrainingGraph,
    costs_us: Sequence[float],
    memory: StepMemory,
    pinned: Actions,
    generator_state_bytes: int,
) -> Problem:
    """Prepare a graph; the arguments are those of `solve`."""
    found = needs(graph)
    cheap, all_kept = (
        _named(found, choose_cheap(found, pinned=pinned, moved_per_kept_byte=moved))
        for moved in (MOVED_PER_KEPT_BYTE, 0)
    )
    evaluate = Evaluator(
        needs=found,
        costs_us=costs_us,
        memory=memory,
        generator_state_bytes=generator_state_bytes,
        offloaded=_read_of(found, pinned.offloaded),
    )
    # What every plan recomputes, as pins say, is not counted.
    anyway = evaluate.again(all_kept)
    evaluate.costs_us = tuple(0.0 if o in anyway else us for o, us in enumerate(costs_us))
    return Problem(
        needs=found,
        cheap=cheap,
        all_kept=all_kept,
        least=frozenset(found.must_keep) | _read_of(found, pinned.kept),
        evaluate=evaluate,
        pinned=_pinned(found, pinned),
        costs_us=costs_us,
    )


def _named(needs: Needs, names: Set[str]) -> frozenset[int]:
    return frozenset(s for s in needs.storages if needs.graph.storages[s].name in names)


def _read_of(needs: Needs, names: Set[str]) -> frozenset[int]:
    """Return the storages of these names that backward reads."""
    return frozenset(s for s in needs.first if needs.graph.storages[s].name in names)


def _pinned(needs: Needs, pinned: Actions) -> dict[int, bool]:
    """Return the pinned storages: True for kept, False for recomputed."""
    recompute = pinned.keys() - pinned.kept
    again = {
        s
        for s in needs.storages
        if needs.graph.storages[s].name in recompute and s not in needs.must_keep
    }
    return dict.fromkeys(again, False) | dict.fromkeys(_read_of(needs, pinned.kept), True)
