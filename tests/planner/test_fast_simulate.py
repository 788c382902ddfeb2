from __future__ import annotations

import random

import pytest

from harness.training_graphs import GraphBuilder, random_graph
from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.fast_simulate import FastSimulation
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.order import order
from thunder_memsave.planner.search.evaluate import Evaluator
from thunder_memsave.planner.simulate import simulate


@pytest.mark.parametrize("seed", range(60))
def test_it_gives_what_the_simulation_of_a_program_gives(seed: int) -> None:
    graph, draw = random_graph(seed), random.Random(seed)
    found = needs(graph)
    memory = StepMemory(
        optimizer_bytes=70, other_bytes=5, update_peak_bytes=30, between_bytes=seed % 2 * 90
    )
    simulation = FastSimulation(found, memory, 16)
    for _ in range(8):
        keep = {s for s in found.storages if draw.random() < 0.6}
        names = {graph.storages[s].name for s in keep | found.must_keep}
        program = order(graph, keeping(names), generator_state_bytes=16)
        result = simulation(keep)
        assert result.peak_bytes == simulate(program, memory).peak_bytes
        again = [step.op for step in program.steps if step.is_repeated]
        assert sorted(op.index for op in again) == sorted(result.again)


def test_a_storage_that_cannot_be_recomputed_is_kept_by_every_plan_that_reads_it() -> None:
    """Backward reads `result` only, which is recomputed from a storage written in place."""
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"hidden": 100})
    b.write("hidden", "written", "x")
    b.op("written", {"result": 60})
    b.op("result", {"out": 1})
    b.backward(g=1)
    b.op("g result", {"dx": 10}, kind="gradient")
    found = needs(b.graph(outputs="out", gradients="dx"))
    hidden, result = sorted(found.storages, key=found.producer.__getitem__)
    evaluate = Evaluator(
        needs=found, costs_us=[1.0] * 5, memory=StepMemory(), generator_state_bytes=16
    )
    assert evaluate({result}).keep == {result}  # nothing reads the other one
    again = evaluate(evaluate({result}).keep - {result})
    assert again.keep == {hidden}
    assert evaluate.excess_bytes(set(), over_bytes=0) == evaluate.excess_bytes(
        {hidden}, over_bytes=0
    )
    assert [step.op.results for step in again.program.steps if step.is_repeated] == [("result",)]
    assert evaluate.backward(set()) == evaluate.backward({hidden})
