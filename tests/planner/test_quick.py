from __future__ import annotations

import random

import pytest

from harness.training_graphs import random_graph
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.needs import needs
from thunder_memsave.planner.order import OrderError, order
from thunder_memsave.planner.quick import QuickSimulation
from thunder_memsave.planner.simulate import simulate


@pytest.mark.parametrize("seed", range(60))
def test_it_gives_what_the_simulation_of_a_program_gives(seed: int) -> None:
    graph, draw = random_graph(seed), random.Random(seed)
    found = needs(graph)
    memory = StepMemory(
        optimizer_bytes=70, other_bytes=5, update_peak_bytes=30, between_bytes=seed % 2 * 90
    )
    simulation = QuickSimulation(found, memory, 16)
    for _ in range(8):
        keep = {s for s in found.storages if draw.random() < 0.6}
        names = {graph.storages[s].name for s in keep}
        try:
            program = order(graph, names, generator_state_bytes=16)
        except OrderError:
            with pytest.raises(OrderError, match="cannot be computed again"):
                simulation(keep)
            continue
        result = simulation(keep)
        assert result.peak_bytes == simulate(program, memory).peak_bytes
        again = [step.op for step in program.steps if step.is_repeated]
        assert sorted(op.index for op in again) == sorted(result.again)
