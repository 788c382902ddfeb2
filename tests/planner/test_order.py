from __future__ import annotations

import pytest

from harness.training_graphs import GraphBuilder, chain, random_graph
from thunder_memsave.planner.actions import NO_ACTIONS, keeping
from thunder_memsave.planner.graph import Program
from thunder_memsave.planner.order import OrderError, order, unrepeatable


def made(program: Program) -> list[str]:
    return [program.storages[s].name for step in program.steps for s in step.makes]


def freed_after(program: Program, number: int) -> set[str]:
    return {program.storages[s].name for s in program.steps[number].frees}


@pytest.mark.parametrize("seed", range(20))
def test_keeping_everything_is_the_graph_as_it_is(seed: int) -> None:
    graph = random_graph(seed)
    for actions in (None, keeping(s.name for s in graph.storages)):
        program = order(graph, actions)
        assert tuple(step.op for step in program.steps) == graph.ops
        assert not any(step.is_repeated for step in program.steps)
        assert all(step.makes == step.op.makes for step in program.steps)


def test_a_storage_that_is_not_kept_is_recomputed_right_before_its_first_reader() -> None:
    program = order(chain(3), keeping({"a2"}))
    assert made(program) == ["a1", "a2", "a3", "dw3", "g2", "a1_again", "dw2", "g1", "dw1"]
    assert [step.is_repeated for step in program.steps].index(True) == 5
    assert "a1" in freed_after(program, 1)
    assert "a1_again" in freed_after(program, 6)


def test_an_operation_is_recomputed_once_from_recomputed_inputs() -> None:
    program = order(chain(4), NO_ACTIONS)
    again = [name for name in made(program) if name.endswith("_again")]
    assert again == ["a1_again", "a2_again", "a3_again"]
    assert made(program).index("dw4") == made(program).index("a3_again") + 1


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("keep_all", [True, False])
def test_every_storage_is_made_before_it_is_freed_and_freed_once(seed: int, keep_all: bool) -> None:
    graph = random_graph(seed)
    kept = {s.name for s in graph.storages} if keep_all else must_keep(seed)
    program = order(graph, keeping(kept))
    alive = set(program.held)
    for number, step in enumerate(program.steps):
        alive |= program.cotangents if number == program.num_forward else frozenset()
        assert alive.isdisjoint(step.makes)
        alive |= set(step.makes)
        assert alive.issuperset(step.frees)
        alive -= set(step.frees)
    assert alive == program.held | graph.gradients


def must_keep(seed: int) -> set[str]:
    graph = random_graph(seed)
    return {graph.storages[s].name for s in unrepeatable(graph)}


def test_a_kept_storage_lives_until_its_last_view_was_read() -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"a": 100})
    b.view("a", "a_t")
    b.op("a_t", {"y": 10})
    b.backward(g=10)
    b.op("g a", {"h": 10})
    b.op("h a_t", {"dx": 10}, kind="gradient")
    program = order(b.graph(outputs="y", gradients="dx"), keeping({"a"}))
    assert made(program) == ["a", "y", "h", "dx"]
    assert freed_after(program, 4) == {"a", "h", "y", "g"}


def test_a_view_of_a_recomputed_storage_stays_a_view() -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"a": 100})
    b.view("a", "a_t")
    b.op("a_t", {"y": 10})
    b.backward(g=10)
    b.op("g a_t", {"dx": 10}, kind="gradient")
    program = order(b.graph(outputs="y", gradients="dx"), NO_ACTIONS)
    assert [step.op.results for step in program.steps if step.is_repeated] == [("a",), ("a_t",)]
    assert made(program) == ["a", "y", "a_again", "dx"]


def test_a_recomputed_random_operation_keeps_its_generator_state() -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"mask": 100}, repeat="replay")
    b.op("x mask", {"y": 10})
    b.backward(g=10)
    b.op("g mask", {"dx": 10}, kind="gradient")
    program = order(b.graph(outputs="y", gradients="dx"), NO_ACTIONS, generator_state_bytes=16)
    assert made(program) == ["mask", "mask_state", "y", "mask_again", "dx"]
    assert program.storages[program.steps[0].makes[1]].nbytes == 16
    assert freed_after(program, 2) == {"mask_state"}


def test_a_storage_written_in_place_cannot_be_recomputed() -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"a": 100})
    b.write("a", "a_written")
    b.op("a_written", {"y": 10})
    b.backward(g=10)
    b.op("g a_written", {"dx": 10}, kind="gradient", symbol="mul")
    graph = b.graph(outputs="y", gradients="dx")
    with pytest.raises(
        OrderError, match=r"backward needs 'a_written' of op .*cannot be recomputed; keep it"
    ):
        order(graph, NO_ACTIONS)
    assert made(order(graph, keeping({"a"}))) == ["a", "y", "dx"]


def test_names_of_another_graph_are_refused() -> None:
    with pytest.raises(
        OrderError,
        match=r"the plan has actions for 'b7', but the graph has no such storages.*plan again",
    ):
        order(chain(3), keeping({"b7"}))
