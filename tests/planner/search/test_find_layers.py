from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from harness.training_graphs import GraphBuilder, chain, llama_like
from thunder_memsave.planner.choices import Needs, needs
from thunder_memsave.planner.cost import costs_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import TrainingGraph
from thunder_memsave.planner.search.find_layers import Block, find_blocks

NUM_LAYERS = 6


@cache
def whole() -> Needs:
    return needs(llama_like(NUM_LAYERS, tokens=64, width=2048, hidden=6144, kv=256))


@cache
def blocks() -> Sequence[Block]:
    return find_blocks(whole(), costs_us(whole().graph, device("cpu")))


def names(graph: TrainingGraph, storages: Sequence[int]) -> list[str]:
    return [graph.storages[s].name for s in storages]


def test_layers_are_found_and_only_the_residual_stream_passes_between_them() -> None:
    before, *layers, after = blocks()
    assert len(layers) == NUM_LAYERS
    assert len({len(block.forward) for block in layers}) == 1
    graph = whole().graph
    passed = [names(graph, block.inputs) for block in layers]
    assert passed == [[], *([f"next{n}"] for n in range(NUM_LAYERS - 1))]
    assert len(before.backward) == 0
    assert after.backward.start == 0


def test_blocks_cover_forward_and_backward_once() -> None:
    graph = whole().graph
    forward = [o for block in blocks() for o in block.forward]
    backward = [p for block in reversed(blocks()) for p in block.backward]
    assert forward == list(range(graph.num_forward))
    assert backward == list(range(len(graph.ops) - graph.num_forward))


def test_a_graph_without_layers_has_no_blocks() -> None:
    graph = chain(12)
    assert find_blocks(needs(graph), [1.0] * len(graph.ops)) == []
    b = GraphBuilder()
    b.input("x")
    b.op("x", {"y": 10})
    b.backward(g=10)
    b.op("g y", {"dx": 10}, kind="gradient")
    assert find_blocks(needs(b.graph(outputs="y", gradients="dx")), [1.0, 1.0]) == []
