"""Equal layers of a captured graph are found by what they do; placing them gives the graph of the whole function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from thunder_memsave.aten import equal_layers as searching
from thunder_memsave.aten import joint_graph as tracing
from thunder_memsave.aten.equal_layers import EqualLayers, equal_layers
from thunder_memsave.aten.joint_graph import JointGraph, Operand, Shortened, joint_graph
from thunder_memsave.aten.placed_layers import NotEqualError, place_layers
from thunder_memsave.frontend import graph_function
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.capture import Capture, capture
from thunder_memsave.frontend.graph_function import GraphFunction
from thunder_memsave.frontend.opaque import OpaqueExecutor
from thunder_memsave.frontend.unseen_calls import UnseenCalls

Make = Callable[[], nn.Module]


class Block(nn.Module):
    def __init__(self, hidden: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.dropout = dropout

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x) + shift))
        return x + F.dropout(self.down(hidden), self.dropout)


class Row(nn.Module):
    """Blocks with something before and after them."""

    def __init__(self, blocks: Sequence[nn.Module], *, trains_shift: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.ones(8), requires_grad=trains_shift)

    def forward(self, x: Tensor) -> Tensor:
        x, shift = self.first(x).relu(), self.shift * 2
        for block in self.blocks:
            x = block(x, shift)
        return self.last(x).logsumexp(-1).mean()


class TakesAll(Row):
    """Reads the result of every block at the end."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block in self.blocks:
            x = block(x, self.shift)
            found.append(x.mean())
        return torch.stack(found).sum()


def odd_one_out(at: int) -> list[nn.Module]:
    blocks = [Block() for _ in range(10)]
    blocks[at] = Block(hidden=24)
    return list(blocks)


def tied() -> nn.Module:
    block = Block()
    return Row([block] * 8)


MAKES: dict[str, Make] = {
    "alike": lambda: Row([Block() for _ in range(8)]),
    "a shared operand with a gradient": lambda: Row([Block() for _ in range(8)], trains_shift=True),
    "random": lambda: Row([Block(dropout=0.5) for _ in range(9)]),
    "in pairs": lambda: Row([Block(hidden=16 + 8 * (i % 2)) for i in range(16)]),
    "another at the end": lambda: Row(odd_one_out(9)),
    "another at the begin": lambda: Row(odd_one_out(0)),
    "frozen but for one weight": lambda: _frozen(Row([Block() for _ in range(8)])),
}


def _frozen(row: Row) -> Row:
    for name, parameter in row.named_parameters():
        parameter.requires_grad_("up" in name)
    return row


@pytest.mark.parametrize("name", MAKES)
def test_a_graph_with_placed_layers_is_the_graph_of_the_whole_function(name: str) -> None:
    function, layers, operands = _found(MAKES[name]())
    assert layers is not None
    whole = joint_graph(function, operands)
    placed = joint_graph(function, operands, Shortened(function.with_layers(layers), layers))
    assert described(placed) == described(whole)
    assert placed.reached == whole.reached
    assert placed.differentiable == whole.differentiable


def test_the_place_of_every_operation_is_that_of_its_own_layer() -> None:
    function, layers, operands = _found(MAKES["alike"]())
    assert layers is not None
    placed = joint_graph(function, operands, Shortened(function.with_layers(layers), layers))
    whole = joint_graph(function, operands)
    assert _modules(placed) == _modules(whole)


@pytest.mark.parametrize(
    "make",
    [tied, lambda: Row(odd_one_out(5)), lambda: TakesAll([Block() for _ in range(8)])],
    ids=["tied", "another in the middle", "results of all layers"],
)
def test_other_rows_are_traced_as_a_whole(make: Make) -> None:
    function, layers, operands = _found(make())
    if layers is None:
        return
    short = Shortened(function.with_layers(layers), layers)
    assert described(joint_graph(function, operands, short)) == described(
        joint_graph(function, operands)
    )


def test_layers_that_are_too_few_are_not_looked_for() -> None:
    assert _found(Row([Block() for _ in range(5)]))[1] is None


def test_as_many_nodes_are_run_for_eight_layers_as_for_forty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_run = [0]
    run = graph_function._Run.compute

    def counted(self: Any, n: fx.Node) -> Any:
        num_run[0] += 1
        return run(self, n)

    monkeypatch.setattr(graph_function._Run, "compute", counted)
    seen = []
    for count in (8, 40):
        function, layers, operands = _found(Row([Block() for _ in range(count)]))
        assert layers is not None
        num_run[0] = 0
        joint_graph(function, operands, Shortened(function.with_layers(layers), layers))
        seen.append(num_run[0] - 2 * len(function.placeholders))
    assert seen[0] == seen[1]


def test_the_search_compares_as_many_pairs_as_the_graph_is_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = [0]
    is_equal = searching._Search._is_equal

    def counted(self: Any, first: int, second: int) -> bool:
        compared[0] += 1
        return is_equal(self, first, second)

    monkeypatch.setattr(searching._Search, "_is_equal", counted)
    for count in (8, 40):
        compared[0] = 0
        function, _, _ = _found(Row([Block() for _ in range(count)]))
        assert compared[0] <= 4 * len(function.graph.graph.nodes)


def test_what_reads_a_layer_from_afar_is_not_placed() -> None:
    function, layers, operands = _found(MAKES["alike"]())
    assert layers is not None
    graph = tracing._traced(function.with_layers(layers), operands).module.graph
    inner = next(n for n in graph.nodes if n.meta.get("equal_layer", (None,)) == (1, 2))
    output = graph.output_node()
    with graph.inserting_before(output):
        graph.call_function(torch.ops.aten.sin.default, (inner,))
    num_before = len(graph.nodes)
    with pytest.raises(NotEqualError, match=r"reads .* of layer 1"):
        place_layers(graph, layers, num_operands=len(operands), rules=[])
    assert len(graph.nodes) == num_before


def _found(module: nn.Module) -> tuple[GraphFunction, EqualLayers | None, list[Operand]]:
    captured = capture(module, Call.of(module.forward, (torch.ones(4, 8),), {}), reason="test")
    function = _function(captured)
    examples = [function.placeholders[i].meta["example_value"] for i in function.read]
    operands = [
        Operand(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad)
        for t in examples
    ]
    index_of = {function.placeholders[i]: at for at, i in enumerate(function.read)}
    layers = equal_layers(captured.graph.graph, index_of, operands.__getitem__)
    return function, layers, operands


def _function(captured: Capture) -> GraphFunction:
    results: Any = captured.graph.graph.output_node().args[0]
    return GraphFunction(captured.graph, results, (), None, UnseenCalls(OpaqueExecutor(), None))


def described(joint: JointGraph) -> list[Any]:
    """Everything of a graph but the names of its nodes."""
    number = {node: i for i, node in enumerate(joint.graph.nodes)}

    def of(node: fx.Node) -> str:
        return f"%{number[node]}"

    nodes = [
        (n.op, n.op == "placeholder" or str(n.target), str(fx.node.map_arg((n.args, n.kwargs), of)))
        for n in joint.graph.nodes
    ]
    gradients = [g if g is None else of(g) for g in joint.gradients]
    return [nodes, gradients, list(map(of, joint.outputs))]


def _modules(joint: JointGraph) -> list[Any]:
    stacks = (n.meta.get("nn_module_stack") or {} for n in joint.graph.nodes)
    return [[path for path, _ in stack.values()] for stack in stacks]
