"""Makes tasks for searches of plans, and finds all plans for graphs with few decisions, by trying them."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain, combinations

from harness.training_graphs import random_graph
from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.graph import StepMemory, TrainingGraph
from thunder_memsave.planner.linear.model import Model
from thunder_memsave.planner.order import OrderError, order
from thunder_memsave.planner.search.evaluate import Evaluator
from thunder_memsave.planner.search.task import Task
from thunder_memsave.planner.simulate import simulate

NOTHING_ELSE = StepMemory()
STATE_BYTES = 16
SEEDS = [seed for seed in range(40) if 3 <= len(needs(random_graph(seed)).storages) <= 10]


def model_of(
    graph: TrainingGraph, costs: Sequence[float], memory: StepMemory = NOTHING_ELSE
) -> Model:
    return Model(
        needs=needs(graph), costs_us=costs, memory=memory, generator_state_bytes=STATE_BYTES
    )


def task_of(model: Model, free: Set[int] | None = None, *, part: float = 1.0) -> Task:
    """Return the task of plans within a part of the peak of the plan that keeps `free`, or everything."""
    evaluate = Evaluator(
        needs=model.needs,
        costs_us=model.costs_us,
        memory=model.memory,
        generator_state_bytes=STATE_BYTES,
    )
    kept = evaluate(frozenset(model.needs.first) if free is None else free)
    return Task(
        model=model, evaluate=evaluate, start=kept, budget_bytes=int(part * kept.peak_bytes)
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
