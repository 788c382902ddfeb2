from __future__ import annotations

from itertools import chain as joined
from itertools import combinations

import pytest

from harness.training_graphs import GraphBuilder, random_graph
from thunder_memsave.planner.actions import NO_ACTIONS, RECOMPUTE, REGATHER, Actions, keeping
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.graph import TrainingGraph
from thunder_memsave.planner.order import OrderError, order
from thunder_memsave.planner.search.cheap import MOVED_PER_KEPT_BYTE, choose_cheap


def swiglu() -> GraphBuilder:
    """`down(silu(gate) * up)`: backward reads all of it, as bfloat16, and silu's input as float32."""
    b = GraphBuilder()
    for name in ("x", "wg", "wu", "wd"):
        b.input(name)
    b.op("x wg", {"gate": 200}, flops=10**6)
    b.op("x wu", {"up": 200}, flops=10**6)
    b.op("gate", {"gate32": 400}, moved_bytes=600)
    b.op("gate32", {"silu32": 400}, moved_bytes=800)
    b.op("silu32", {"silu": 200}, moved_bytes=600)
    b.op("silu up", {"product": 200}, moved_bytes=600)
    b.view("product", "product_t")
    b.op("product_t wd", {"y": 50}, flops=10**6)
    b.backward(g=50)
    b.op("g product_t", {"dwd": 10}, kind="gradient", flops=10**6)
    b.op("g silu up gate32", {"h": 200})
    b.op("h x", {"dwg": 10}, kind="gradient", flops=10**6)
    return b


def cheap(graph: TrainingGraph) -> frozenset[str]:
    return choose_cheap(needs(graph))


def test_a_gated_unit_keeps_only_the_results_of_matrix_products() -> None:
    assert cheap(swiglu().graph(outputs="y", gradients="dwd dwg")) == {"gate", "up"}


def test_pinned_storages_are_kept_or_recomputed_in_any_case() -> None:
    graph = swiglu().graph(outputs="y", gradients="dwd dwg")
    assert choose_cheap(needs(graph), pinned=keeping({"silu"})) >= {"silu", "up"}
    again = Actions({"gate": RECOMPUTE})
    assert choose_cheap(needs(graph), pinned=again).isdisjoint({"gate"})


def test_a_mask_is_kept_where_it_is_smaller_than_its_input() -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"a": 400}, flops=10)
    b.op("a", {"mask": 100}, moved_bytes=500)
    b.op("a mask", {"y": 400}, moved_bytes=900)
    b.backward(g=400)
    b.op("g mask", {"dx": 10}, kind="gradient")
    graph = b.graph(outputs="y", gradients="dx")
    assert cheap(graph) == {"mask"}
    b.op("g a", {"dw": 10}, kind="gradient")
    assert cheap(b.graph(outputs="y", gradients="dx dw")) == {"a"}


@pytest.mark.parametrize(
    "dear",
    [
        {"flops": 1},
        {"repeat": "replay"},
        {"repeat": "no"},
        {"moved_bytes": 40 * 100},
        {"sent_bytes": 1},
    ],
)
def test_results_of_expensive_operations_are_kept(dear: dict[str, object]) -> None:
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"a": 100}, **dear)  # type: ignore[arg-type]
    b.op("a", {"y": 10})
    b.backward(g=10)
    b.op("g a", {"dx": 10}, kind="gradient")
    assert cheap(b.graph(outputs="y", gradients="dx")) == {"a"}


def test_gathered_parameters_are_kept_unless_they_are_pinned_to_regather() -> None:
    b = GraphBuilder()
    b.input("w")
    b.op("w", {"whole": 100}, kind="gathered", sent_bytes=90)
    b.op("whole", {"y": 10}, flops=10)
    b.backward(g=10)
    b.op("g whole", {"dx": 10}, kind="gradient")
    graph = b.graph(outputs="y", gradients="dx")
    assert cheap(graph) == {"whole"}
    assert choose_cheap(needs(graph), pinned=Actions({"whole": REGATHER})) == set()


@pytest.mark.parametrize("pinned", [NO_ACTIONS, Actions({"cast": REGATHER})])
def test_the_cast_of_a_parameter_is_recomputed_from_the_parameter(pinned: Actions) -> None:
    b = GraphBuilder()
    b.input("w")
    b.op("w", {"cast": 100}, kind="gathered", moved_bytes=300)
    b.op("cast", {"y": 10}, flops=10)
    b.backward(g=10)
    b.op("g cast", {"dx": 10}, kind="gradient")
    graph = b.graph(outputs="y", gradients="dx")
    assert choose_cheap(needs(graph), pinned=pinned) == set()


@pytest.mark.parametrize("seed", range(30))
def test_nothing_keeps_less_for_what_it_moves(seed: int) -> None:
    graph = random_graph(seed, num_forward=7)
    names = [graph.storages[s].name for s in needs(graph).storages]
    subsets = joined.from_iterable(combinations(names, k) for k in range(len(names) + 1))
    best = min(cost for keep in subsets if (cost := price(graph, set(keep))) is not None)
    assert price(graph, set(cheap(graph))) == pytest.approx(best)


def price(graph: TrainingGraph, keep: set[str]) -> float | None:
    """Return kept bytes plus the price of recomputation; None if that takes an expensive operation."""
    try:
        steps = order(graph, keeping(keep)).steps
    except OrderError:
        return None
    again = [step.op for step in steps if step.is_repeated and step.makes]
    if any(op.repeat == "replay" or op.sent_bytes or op.flops for op in again):
        return None
    moved = sum(op.moved_bytes / MOVED_PER_KEPT_BYTE + 1 for op in again)
    return sum(s.nbytes for s in graph.storages if s.name in keep) + moved
