"""Plans models of equal layers: plans each layer alone, and puts the layers' plans together.

Backward goes from the last layer to the first, so the storages that a layer keeps are live while the later ones run.
The master program chooses one of the known plans for each layer, such that in each layer there is room for the storages
that the earlier ones keep and for its own peak. Its dual prices say what a byte is worth in each layer; at these prices
layers are planned anew, until none has a better plan (column generation, Dantzig and Wolfe). The least cost of all
layers at these prices, less the value of the budget, bounds the time of any plan in which no layer recomputes what the
one after it reads (Lagrange).
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from thunder_memsave.planner.linear.peak_program import Constants, PeakModel, live_anyway
from thunder_memsave.planner.linear.program import LinearProgram
from thunder_memsave.planner.search.evaluate import Evaluator
from thunder_memsave.planner.search.find_layers import find_blocks
from thunder_memsave.planner.search.layer_plans import (
    BlockGraph,
    BlockPlan,
    BlockPlans,
    BlockPrices,
    block_graph,
)

_MOST_ROUNDS = 12
_GAP = 2e-3
_MASTER_LIMIT_S = 1.0
_FIRST_PRICES = 10
_MOST_CORRECTIONS = 4
_MERGED = (1, 2, 4, 8)


def search_layers(
    model: PeakModel,
    evaluate: Evaluator,
    *,
    budget_bytes: float,
    deadline_s: float,
    merged: Sequence[int] = _MERGED,
    found: dict[int, Layers | None] | None = None,
) -> float:
    """Evaluate plans in which no layer recomputes what the one after it reads; the evaluator remembers them.

    If none of them fits, several layers are merged into one.

    Args:
        model: Provides needs, costs and pins.
        evaluate: Evaluator of the same graph.
        budget_bytes: Bytes that plans should fit in.
        deadline_s: End of the search by `time.thread_time`: a busy machine does not change the plan.
        merged: Numbers of layers to merge into one, in the order in which they are tried.
        found: Layers and their plans by number of merged layers, kept from one search to the next.

    Returns:
        A lower bound on the microseconds of any such plan; 0 if not known.
    """
    bound_us, known = 0.0, {} if found is None else found
    for number in merged:
        if number not in known:
            known[number] = find_layers(model, merged=number)
        layers = known[number]
        if layers is None or time.thread_time() > deadline_s:
            break
        layers.price(budget_bytes, deadline_s=deadline_s)
        bound_us = bound_us or layers.bound_us
        if _evaluate(layers, evaluate, budget_bytes):
            break
    return bound_us


def _evaluate(layers: Layers, evaluate: Evaluator, budget_bytes: float) -> bool:
    """Evaluate the layers' plans exactly, for ever smaller targets; tell whether one fits the budget."""
    target_bytes = budget_bytes
    for _ in range(_MOST_CORRECTIONS):
        keep = layers.keep(target_bytes)
        if keep is None:
            return False
        found = evaluate(keep)
        if found.peak_bytes <= budget_bytes:
            return True
        target_bytes -= found.peak_bytes - budget_bytes
    return False


@dataclass(frozen=True, kw_only=True)
class _Layer:
    cut: BlockGraph
    plans: BlockPlans
    most_more_bytes: float
    """The most live bytes in this layer's backward beyond those of the layer that its plans are made with."""
    least_more_bytes: float
    forward_bytes: float
    """Peak of its forward without the storages that a plan keeps."""


@dataclass(kw_only=True)
class Layers:
    """The layers of a model, and their known plans."""

    model: PeakModel
    layers: Sequence[_Layer]
    between_bytes: float
    """Bytes live in every plan while the caller has a loss."""
    bound_us: float = 0.0

    def price(self, budget_bytes: float, *, deadline_s: float) -> None:
        """Make plans for layers until none is better at the last prices.

        Args:
            budget_bytes: Bytes for the whole step.
            deadline_s: End of the search by `time.thread_time`: a busy machine does not change the plan.
        """
        self._start()
        self.bound_us = 0.0
        most_us = sum(self.model.costs_us[o] for o in self.model.needs.ops)
        for _ in range(_MOST_ROUNDS):
            master = _Master(self, budget_bytes, relaxed=True)
            solved = master.prices()
            if solved is None:
                return
            bound, is_new = self._plan_at(solved, deadline_s)
            self.bound_us = max(self.bound_us, float(bound))
            is_good = solved.us <= self.bound_us * (1 + _GAP)
            # Beyond this bound the slack is used: the missing bytes cost more than recomputing everything.
            none_fits = self.bound_us > most_us
            if not is_new or is_good or none_fits or time.thread_time() > deadline_s:
                return

    def keep(self, budget_bytes: float) -> frozenset[int] | None:
        """Return the storages that the fastest combination of known plans keeps; None if none fits."""
        chosen = _Master(self, budget_bytes, relaxed=False).chosen()
        if chosen is None:
            return None
        return frozenset(
            layer.cut.needs.storages[number]
            for layer, plan in zip(self.layers, chosen, strict=True)
            for number in plan.keep
        )

    def _start(self) -> None:
        """Make plans at a few prices of memory."""
        for plans in self._classes():
            if plans.known:
                continue
            plans.known.update({plans.evaluate(frozenset(plans.cut.needs.storages)): None})
            for number in range(_FIRST_PRICES):
                us_per_byte = self._middle_us_per_byte() * 4.0 ** (number - _FIRST_PRICES / 2)
                plan, _ = plans.cheapest(
                    BlockPrices(saved_us_per_byte=us_per_byte, peak_us_per_byte=0.0)
                )
                if plan is not None:
                    plans.known[plan] = None

    def _middle_us_per_byte(self) -> float:
        us = sum(self.model.costs_us[o] for o in self.model.needs.ops)
        nbytes = sum(self.model.needs.graph.storages[s].nbytes for s in self.model.needs.storages)
        return us / max(1, nbytes)

    def _classes(self) -> list[BlockPlans]:
        return list({id(layer.plans): layer.plans for layer in self.layers}.values())

    def _plan_at(self, solved: _MasterPrices, deadline_s: float) -> tuple[float, bool]:
        """Plan layers at prices. Return a lower bound, 0 if the time was over, and whether a plan is new."""
        total, is_new = solved.constant_us, False
        done: dict[Hashable, float] = {}
        for layer, prices in zip(self.layers, solved.layers, strict=True):
            key = (id(layer.plans), prices)
            if key not in done:
                if time.thread_time() > deadline_s:
                    return 0.0, is_new
                plan, done[key] = layer.plans.cheapest(prices)
                if plan is not None and plan not in layer.plans.known:
                    layer.plans.known[plan] = None
                    is_new = True
            total += done[key] + prices.peak_us_per_byte * layer.least_more_bytes
        return total, is_new


def find_layers(model: PeakModel, *, merged: int = 1) -> Layers | None:
    """Cut a model into its layers; None if there are too few, or they differ."""
    blocks = find_blocks(model.needs, model.costs_us, merged=merged)
    if not blocks:
        return None
    constants = live_anyway(model.needs, model.memory)
    cuts = [block_graph(model.needs, model.costs_us, block) for block in blocks]
    classes: dict[Hashable, BlockPlans] = {}
    layers = []
    for cut in cuts:
        key = cut.looks(model.pinned)
        if key not in classes:
            classes[key] = BlockPlans(
                cut=cut,
                constants=constants,
                pinned=model.pinned,
                memory=model.memory,
                generator_state_bytes=model.generator_state_bytes,
            )
        layers.append(_layer(cut, classes[key], constants))
    return Layers(model=model, layers=layers, between_bytes=float(constants.forward[-1]))


def _layer(cut: BlockGraph, plans: BlockPlans, constants: Constants) -> _Layer:
    here, there = cut.block.backward, plans.cut.block.backward
    more = constants.before[here.start : here.stop] - constants.before[there.start : there.stop]
    forward = constants.forward[cut.block.forward.start : cut.block.forward.stop]
    return _Layer(
        cut=cut,
        plans=plans,
        most_more_bytes=float(more.max(initial=-np.inf)) if len(more) else 0.0,
        least_more_bytes=float(more.min(initial=np.inf)) if len(more) else 0.0,
        forward_bytes=float(forward.max(initial=0.0)),
    )


@dataclass(frozen=True, kw_only=True)
class _MasterPrices:
    us: float
    layers: Sequence[BlockPrices]
    constant_us: float


class _Master:
    """Chooses one plan for each layer. Bytes and time are scaled, so that the numbers are neither large nor small."""

    def __init__(self, whole: Layers, budget_bytes: float, *, relaxed: bool) -> None:
        layers = whole.layers
        self._layers, self._budget_bytes, self._relaxed = layers, budget_bytes, relaxed
        self._between_bytes = whole.between_bytes
        self._program = LinearProgram()
        self._byte = 1000.0 / budget_bytes
        self._us = 1000.0 / max(
            1e-9, max(p.us for x in layers for p in x.plans.known) * len(layers)
        )
        self._choices = [{p: self._choice(p) for p in layer.plans.known} for layer in layers]
        self._slack = self._program.variable(cost=1e4, high=np.inf) if relaxed else None
        self._names: list[tuple[str, int]] = []
        for number, choices in enumerate(self._choices):
            self._row("one", number, [(v, 1.0) for v in choices.values()], least=1.0)
        self._add_memory()

    def chosen(self) -> list[BlockPlan] | None:
        """Return the plans of all layers; None if no combination was found to fit."""
        solution = self._program.solve(time_limit_s=_MASTER_LIMIT_S, gap=_GAP / 2)
        if solution.values is None:
            return None
        x = solution.values
        return [max(choices, key=lambda p: x[choices[p]]) for choices in self._choices]

    def prices(self) -> _MasterPrices | None:
        """Return the dual prices of memory; None if there is no solution."""
        solved = self._program.prices()
        if solved is None:
            return None
        by_name = dict(zip(self._names, solved.prices, strict=True))
        peak = [by_name.get(("peak", k), 0.0) for k in range(len(self._layers))]
        forward = [by_name.get(("forward", k), 0.0) for k in range(len(self._layers))]
        per_byte, per_us = self._byte / self._us, 1.0 / self._us
        rows = np.array(peak) + np.array(forward)
        between = by_name.get(("between", 0), 0.0)
        later = np.concatenate([np.cumsum(rows[::-1])[::-1][1:], [0.0]]) + between
        constant = between * (self._between_bytes - self._budget_bytes) * per_byte + sum(
            (p * -self._budget_bytes + f * (layer.forward_bytes - self._budget_bytes)) * per_byte
            for layer, p, f in zip(self._layers, peak, forward, strict=True)
        )
        return _MasterPrices(
            us=solved.cost * per_us,
            layers=[
                BlockPrices(
                    saved_us_per_byte=float(f"{later[k] * per_byte:.9e}"),
                    peak_us_per_byte=float(f"{peak[k] * per_byte:.9e}"),
                )
                for k in range(len(self._layers))
            ],
            constant_us=constant,
        )

    def _choice(self, plan: BlockPlan) -> int:
        high = np.inf if self._relaxed else 1.0
        return self._program.variable(cost=plan.us * self._us, high=high, integer=not self._relaxed)

    def _row(
        self,
        name: str,
        number: int,
        terms: Sequence[tuple[int, float]],
        **bounds: float,
    ) -> None:
        self._program.row(terms, **bounds)
        self._names.append((name, number))

    def _add_memory(self) -> None:
        """Require, in each layer, room for the storages that earlier layers keep and for its own peak."""
        before: list[tuple[int, float]] = []
        slack = [(self._slack, -1.0)] if self._slack is not None else []
        for number, (layer, choices) in enumerate(zip(self._layers, self._choices, strict=True)):
            more = layer.least_more_bytes if self._relaxed else layer.most_more_bytes
            peaks = [(v, (p.peak_bytes + more) * self._byte) for p, v in choices.items()]
            if len(layer.cut.block.backward):
                self._row(
                    "peak", number, [*before, *peaks, *slack], most=self._budget_bytes * self._byte
                )
            room = (self._budget_bytes - layer.forward_bytes) * self._byte
            if len(layer.cut.block.forward):
                self._row("forward", number, [*before, *slack], most=room)
            # Each sum adds to the one before, so that rows stay short.
            waiting = self._program.variable(high=np.inf)
            saved = [(v, -p.saved_bytes * self._byte) for p, v in choices.items()]
            less = [(v, -f) for v, f in before]
            self._row("waiting", number, [(waiting, 1.0), *less, *saved], least=0.0)
            before = [(waiting, 1.0)]
        room = (self._budget_bytes - self._between_bytes) * self._byte
        self._row("between", 0, [*before, *slack], most=room)
