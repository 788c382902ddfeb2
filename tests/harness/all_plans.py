"""Finds all plans for graphs with few decisions, by trying them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

from harness.training_graphs import random_graph
from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.linear.peak_program import PeakModel
from thunder_memsave.planner.order import OrderError, order
from thunder_memsave.planner.simulate import simulate

STATE_BYTES = 16
SEEDS = [seed for seed in range(40) if 3 <= len(needs(random_graph(seed)).storages) <= 10]


def model_of(graph: TrainingGraph, costs: Sequence[float]) -> PeakModel:
    return PeakModel(
        needs=needs(graph),
        costs_us=costs,
        memory=StepMemory(),
        generator_state_bytes=STATE_BYTES,
    )


def all_plans(graph: TrainingGraph, costs: Sequence[float]) -> list[tuple[int, float]]:
    """Return the peak and the recompute time of every plan."""
    names = [graph.storages[s].name for s in needs(graph).storages]
    plans = []
    for keep in chain.from_iterable(combinations(names, k) for k in range(len(names) + 1)):
        try:
            program = order(graph, keeping(keep), generator_state_bytes=STATE_BYTES)
        except OrderError:
            continue
        us = sum(costs[s.op.index] for s in program.steps if s.is_repeated)
        plans.append((simulate(program).peak_bytes, us))
    return plans
