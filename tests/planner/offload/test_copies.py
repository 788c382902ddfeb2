"""Copies in a program free and take exactly the bytes of a plan, as the fast simulation of plans says."""

from __future__ import annotations

import random

import pytest

from harness.training_graphs import GraphBuilder, chain, random_graph
from thunder_memsave.planner.actions import keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.fast_simulate import FastSimulation
from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.offload.copies import with_copies
from thunder_memsave.planner.order import order
from thunder_memsave.planner.simulate import simulate


def symbols(program: Program) -> list[str]:
    """Return the copies by what they read and make, and the results of other operations."""
    return [" ".join(s.op.results) for s in program.steps]


def test_a_value_is_out_after_its_last_reader_and_back_before_its_first() -> None:
    graph = chain(3)
    program = with_copies(order(graph), [graph.storage_of["a1"]])
    assert symbols(program) == [
        *("a1", "a1_host", "a2", "a1_host_done", "a3"),
        *("dw3", "g2", "a1_back", "a1_back_done", "dw2", "g1", "dw1"),
    ]
    assert program.num_forward == 5
    freed = {program.storages[s].name: step.op.symbol for step in program.steps for s in step.frees}
    assert freed["a1"] == "wait_copy_out"
    assert freed["a1_host"] == "wait_copy_in"
    assert program.storages[program.steps[1].makes[0]].nbytes == 0


def test_it_takes_the_peak_of_the_chain_down_by_what_is_away() -> None:
    graph = chain(6)
    kept = simulate(order(graph))
    away = [graph.storage_of[f"a{n}"] for n in range(1, 6)]
    offloaded = simulate(with_copies(order(graph), away))
    assert kept.live_bytes[order(graph).num_forward] == 100 * 8 + 60  # a0, a1..a6, g6; weights
    assert offloaded.live_bytes[with_copies(order(graph), away).num_forward] == 100 * 3 + 60
    assert offloaded.peak_bytes < kept.peak_bytes


def test_a_copy_out_waits_for_the_last_write() -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"a": 100})
    b.write("a", "a2", "x")
    b.op("a2", {"y": 10})
    b.backward(g=10)
    b.op("g a2", {"dx": 10}, kind="gradient")
    graph = b.graph(outputs="y", gradients="dx")
    program = with_copies(order(graph), [graph.storage_of["a"]])
    assert symbols(program)[:5] == ["a", "a2", "a_host", "y", "a_host_done"]


def test_what_backward_does_not_read_stays() -> None:
    graph = chain(3)
    program = order(graph)
    assert with_copies(program, [graph.storage_of["a3"]]) is program


@pytest.mark.parametrize("seed", range(60))
def test_the_fast_simulation_of_plans_has_the_peak_of_the_program(seed: int) -> None:
    graph, draw = random_graph(seed), random.Random(seed)
    found = needs(graph)
    memory = StepMemory(update_peak_bytes=30, between_bytes=seed % 2 * 90)
    for _ in range(6):
        away = frozenset(s for s in found.first if draw.random() < 0.4)
        simulation = FastSimulation(found, memory, 16, away)
        keep = away | {s for s in found.storages if draw.random() < 0.5}
        names = {graph.storages[s].name for s in keep | found.must_keep}
        program = order(graph, keeping(names), generator_state_bytes=16)
        expected = simulate(with_copies(program, away), memory).peak_bytes
        assert simulation(keep).peak_bytes == expected
