from __future__ import annotations

from dataclasses import replace

import pytest

from harness.training_graphs import GraphBuilder
from thunder_memsave.planner.choices import needs
from thunder_memsave.planner.cost import alone_us, costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import TrainingGraph
from thunder_memsave.planner.riding import with_riding
from thunder_memsave.planner.search.cheap import choose_cheap

PRODUCT = 10**6
"""FLOPs of an operation that does not fuse."""


def gated_unit(gate_bytes: int = 200) -> GraphBuilder:
    """`down(silu(gate) * up)`."""
    b = GraphBuilder()
    for name in ("x", "wg", "wu", "wd"):
        b.input(name)
    b.op("x wg", {"gate": gate_bytes}, flops=PRODUCT)
    b.op("x wu", {"up": 200}, flops=PRODUCT)
    b.op("gate", {"silu": 200}, moved_bytes=400)
    b.op("silu up", {"product": 200}, moved_bytes=600)
    b.op("product wd", {"y": 50}, flops=PRODUCT)
    b.backward(g=50)
    b.op("g wd", {"h": 200}, flops=PRODUCT)
    b.op("g product", {"dwd": 10}, kind="gradient", flops=PRODUCT)
    return b


def late_unit() -> GraphBuilder:
    """The same, with the gradient of a weight before the gradients that do not wait for it."""
    b = gated_unit()
    dwd, h = b.ops.pop(), b.ops.pop()
    b.ops += [dwd, h]
    return b


def gated_backward(b: GraphBuilder) -> TrainingGraph:
    b.op("h silu", {"h_up": 200})
    b.op("h_up x", {"dwu": 10}, kind="gradient", flops=PRODUCT)
    b.op("h up", {"h_silu": 200})
    b.op("h_silu gate", {"h_gate": 200})
    b.op("h_gate x", {"dwg": 10}, kind="gradient", flops=PRODUCT)
    return b.graph(outputs="y", gradients="dwd dwu dwg")


def marked(graph: TrainingGraph) -> TrainingGraph:
    """All but products fuse."""
    return with_riding(graph, {n for n, op in enumerate(graph.ops) if not op.flops})


def riding(graph: TrainingGraph) -> set[str]:
    return {name for op in marked(graph).ops if op.rides for name in op.results}


def test_an_activation_rides_beside_its_derivative_and_what_a_product_reads_does_not() -> None:
    assert riding(gated_backward(gated_unit())) == {"silu"}


def joining(graph: TrainingGraph) -> dict[str, tuple[str, int]]:
    joins = {op.results[0]: (op.joins, op.joined_bytes) for op in marked(graph).ops}
    return {name: found for name, found in joins.items() if found[0]}


def test_what_a_product_reads_joins_the_kernel_behind_which_that_can_come() -> None:
    graph = gated_backward(late_unit())
    assert riding(graph) == {"silu"}
    assert joining(graph) == {"product": ("h_up", 200)}
    found = marked(graph)
    position = graph.ops.index(next(op for op in graph.ops if "product" in op.results))
    h100 = replace(device("h100"), launch_us=0.0)
    before, after = (costs_us(g, h100)[position] for g in (graph, found))
    assert after == pytest.approx(before / 3), "it reads nothing that is not read anyway"
    assert alone_us(found.ops[position], h100) == pytest.approx(before - after)
    measured = {"product": 30.0}
    ops = [replace(op, key="product") if op.joins else op for op in found.ops]
    assert costs_us(replace(found, ops=tuple(ops)), h100, measured)[position] == 10.0


def test_it_joins_none_over_many_products_or_what_is_no_product() -> None:
    def graph(num_products: int, flops: int = PRODUCT) -> TrainingGraph:
        b = late_unit()
        for number in range(num_products - 1):
            b.op("g wd", {f"other{number}": 10}, kind="gradient", flops=flops)
        return gated_backward(b)

    assert set(joining(graph(2))) == {"product"}
    assert set(joining(graph(3))) == set()
    assert set(joining(graph(2, flops=0))) == {"product"}, "what fuses is passed"
    b = late_unit()
    b.op("g", {"moved": 10}, kind="gradient", repeat="no", flops=PRODUCT)
    assert set(joining(gated_backward(b))) == set()


def test_it_joins_no_kernel_that_needs_the_product() -> None:
    b = gated_unit()
    b.op("g product", {"dwd": 200}, flops=PRODUCT)
    b.op("dwd silu up", {"after": 200}, kind="gradient")
    assert joining(b.graph(outputs="y", gradients="after")) == {}


def test_random_numbers_join_none() -> None:
    b = GraphBuilder()
    b.input("x", 100)
    b.op("x", {"drawn": 100}, repeat="replay", moved_bytes=200)
    b.op("drawn", {"y": 100}, flops=PRODUCT)
    b.backward(g=100)
    b.op("g drawn", {"dw": 10}, kind="gradient", flops=PRODUCT)
    b.op("g x", {"dx": 10}, kind="gradient")
    assert joining(b.graph(outputs="y", gradients="dw dx")) == {}


def test_nothing_rides_where_nothing_fuses() -> None:
    graph = gated_backward(gated_unit())
    assert with_riding(graph, ()) is graph


def test_what_rides_costs_nothing_and_is_not_kept_where_all_is() -> None:
    graph = gated_backward(gated_unit())
    found = marked(graph)
    position = graph.ops.index(next(op for op in graph.ops if "silu" in op.results))
    cpu = device("cpu")
    assert costs_us(graph, cpu)[position] > 0 == costs_us(found, cpu)[position]
    before, after = (choose_cheap(needs(g), moved_per_kept_byte=0) for g in (graph, found))
    assert before - after == {"silu"}


def test_it_does_not_ride_where_kernels_before_and_after_a_product_read_it() -> None:
    b = gated_unit()
    b.op("h silu", {"h_up": 200})
    b.op("h_up wu", {"after": 200}, flops=PRODUCT)
    b.op("after silu", {"again": 200})
    b.op("again x", {"dwu": 10}, kind="gradient", flops=PRODUCT)
    graph = b.graph(outputs="y", gradients="dwd dwu")
    assert riding(graph) == set()


def test_it_does_not_ride_where_it_reads_more_than_it_saves() -> None:
    """Forward need not write the result, and backward does not read it; so it may read 400 bytes more."""

    def graph(gate_bytes: int) -> TrainingGraph:
        b = gated_unit(gate_bytes)
        b.op("h silu", {"h_up": 200})
        b.op("h_up x", {"dwu": 10}, kind="gradient", flops=PRODUCT)
        return b.graph(outputs="y", gradients="dwd dwu")

    assert riding(graph(400)) == {"silu"}
    assert riding(graph(401)) == set()


def test_what_forward_writes_anyway_saves_one_read_alone() -> None:
    def graph(x_bytes: int) -> TrainingGraph:
        b = GraphBuilder()
        b.input("x", x_bytes)
        b.input("w")
        b.op("x", {"cast": 200})
        b.op("cast w", {"y": 50}, flops=PRODUCT)
        b.backward(g=50)
        b.op("g cast", {"dw": 10}, kind="gradient")
        return b.graph(outputs="y", gradients="dw")

    assert riding(graph(200)) == {"cast"}
    assert riding(graph(201)) == set()


def test_a_chain_rides_whole() -> None:
    b = GraphBuilder()
    for name in ("x", "w"):
        b.input(name, 100)
    b.op("x w", {"gate": 100}, flops=PRODUCT)
    b.op("gate", {"wide": 200})
    b.view("wide", "seen")
    b.op("seen", {"silu": 200})
    b.op("silu", {"y": 50}, flops=PRODUCT)
    b.backward(g=200)
    b.op("g silu", {"h": 200})
    b.op("h x", {"dw": 10}, kind="gradient", flops=PRODUCT)
    assert riding(b.graph(outputs="y", gradients="dw")) == {"wide", "silu"}


def test_random_numbers_and_outputs_never_ride() -> None:
    b = GraphBuilder()
    b.input("x", 100)
    b.op("x", {"drawn": 100}, repeat="replay")
    b.op("drawn", {"y": 100})
    b.backward(g=100)
    b.op("g drawn y", {"dx": 10}, kind="gradient")
    assert riding(b.graph(outputs="y", gradients="dx")) == set()
