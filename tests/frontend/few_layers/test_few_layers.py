"""A plan captures few of many equal layers, and its graph is that of all; any doubt, and all are captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from thunder_memsave.frontend import capture as capturing
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.capture import Capture, capture
from thunder_memsave.frontend.few_layers.capture import capture_few_layers
from thunder_memsave.frontend.few_layers.equal_modules import differences
from thunder_memsave.frontend.few_layers.plain_loops import is_called_alike, longest_list


class Layer(nn.Module):
    def __init__(self, index: int, hidden: int = 16) -> None:
        super().__init__()
        self.index, self.label = index, f"layers.{index}"
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.scale = 1.0

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)) + shift)) * self.scale


class ReadsIndex(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift) / (self.index + 1)


class AsksIndex(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x, shift) if self.index else x


class Model(nn.Module):
    def __init__(self, count: int = 18, make: Callable[[int], nn.Module] = Layer) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=count, layer_types=["full"] * count)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.shift = nn.Parameter(torch.ones(16))
        self.layers = nn.ModuleList(make(i) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x, shift = self.first(x), self.shift.exp()
        for layer in self.layers[: self.config.num_layers]:
            x = layer(x, shift)
        return self.last(x).sum()


class Counted(Model):
    def forward(self, x: Tensor) -> Tensor:
        shifts = {"full": self.shift, "sliding": -self.shift}
        for i, layer in enumerate(self.layers):
            x = layer(x, shifts[self.config.layer_types[i]])
        return x.sum()


class EveryEighth(Model):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, self.shift)
            if i % 8 == 7:
                x = self.first(x)
        return x.sum()


class CountsOutside(Model):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, self.shift * i)
        return x.sum()


class AllResults(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.shift)
        return x.sum() + len(self.layers)


def few(model: nn.Module) -> Capture | None:
    call = Call.of(model.forward, (torch.ones(4, 8),), {})
    return capture_few_layers(model, call, reason="test", is_guarded=False, is_of_mode=False)


def whole(model: nn.Module) -> Capture:
    call = Call.of(model.forward, (torch.ones(4, 8),), {})
    return capture(model, call, reason="test", is_guarded=False)


@pytest.mark.parametrize(
    "make", [Model, Counted, lambda: Model(40)], ids=["plain", "counted", "40"]
)
def test_the_graph_is_that_of_all_layers(make: Callable[[], nn.Module]) -> None:
    model = make()
    found = few(model)
    assert found is not None
    assert list(described(found)) == list(described(whole(model)))


def test_the_layers_are_as_before_afterwards() -> None:
    model = Model()
    before = [(name, id(module)) for name, module in model.named_modules()]
    few(model)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    assert [layer.index for layer in model.layers] == list(range(18))


def test_as_many_operations_are_captured_for_forty_layers_as_for_eighteen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    graph_of = capturing._graph_of

    def counted(*args: Any) -> Any:
        output = graph_of(*args)
        seen.append(len(output.backend_input.graph_module.graph.nodes))
        return output

    monkeypatch.setattr(capturing, "_graph_of", counted)
    few(Model(18))
    few(Model(40))
    assert seen[:2] == seen[2:]
    assert len(seen) == 4


def _other_shape(index: int) -> nn.Module:
    return Layer(index, hidden=16 if index != 6 else 24)


def _other_scale(index: int) -> nn.Module:
    layer = Layer(index)
    layer.scale = 2.0 if index == 6 else 1.0
    return layer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(15),
        lambda: Model(make=ReadsIndex),
        lambda: Model(make=AsksIndex),
        lambda: Model(make=_other_shape),
        lambda: Model(make=_other_scale),
        EveryEighth,
        CountsOutside,
        AllResults,
    ],
    ids=[
        "few layers",
        "a layer reads its number",
        "a layer asks for its number",
        "another shape",
        "another setting",
        "something after every eighth",
        "a counter",
        "another reader of the list",
    ],
)
def test_any_doubt_and_all_are_captured(make: Callable[[], nn.Module]) -> None:
    assert few(make()) is None


def test_types_of_layers_may_be_counted_where_there_is_one() -> None:
    model = Counted()
    assert is_called_alike(model, "layers")
    model.config.layer_types[3] = "sliding"
    assert not is_called_alike(model, "layers")


def test_the_longest_list_is_found_by_its_path() -> None:
    found = longest_list(nn.ModuleDict({"a": Model(3), "b": Model(5)}))
    assert found is not None
    assert found.path == "b.layers"


def test_differences_are_named_by_their_paths() -> None:
    assert differences([Layer(1), Layer(2)]) == [
        {"index": 1, "label": "layers.1"},
        {"index": 2, "label": "layers.2"},
    ]
    assert differences([Layer(1), ReadsIndex(1)]) is None


@pytest.mark.parametrize(("slope", "is_equal"), [(0.1, True), (0.2, False)])
def test_functions_with_bound_arguments_are_compared_by_these(slope: float, is_equal: bool) -> None:
    one, other = Layer(1), Layer(1)
    for layer, bound in ((one, 0.1), (other, slope)):
        layer.activation = functools.partial(nn.functional.leaky_relu, negative_slope=bound)  # type: ignore[assignment]
    assert (differences([one, other]) is not None) is is_equal


def described(found: Capture) -> Iterator[Any]:
    """Everything of a capture but the names of its nodes."""
    nodes = list(found.graph.graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    for n in nodes:
        arguments = fx.node.map_arg((n.args, n.kwargs), lambda node: f"%{number[node]}")
        values = [v for v in tree_leaves(n.meta.get("example_value")) if isinstance(v, Tensor)]
        facts = [(v.shape, v.dtype, v.stride(), v.requires_grad) for v in values]
        modules = [path for path, _ in (n.meta.get("nn_module_stack") or {}).values()]
        what = n.op if n.op == "placeholder" else (n.op, n.target, str(arguments))
        yield what, facts, modules, n.meta.get("stack_trace")
    for each in found.inputs:
        is_given = each.kind == "user"  # a fake tensor of its capture
        yield each.kind, is_given or (each.name, id(each.tensor))
