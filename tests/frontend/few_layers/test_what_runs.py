"""What runs after a capture of few layers is what all of them compute, and is captured anew where one changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave.compiler import compile_call
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.few_layers.capture import capture_few_layers

COUNT = 18


class Layer(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.randn(4))
        self.dropout = nn.Dropout(0.2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(torch.tanh(self.linear(self.norm(x)) + self.shift))
        return x + y * self.scale


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(make() for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def data() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each capture was one of few layers."""
    seen: list[bool] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        capture = capture_few_layers(*args, **kwargs)
        seen.append(capture is not None)
        return capture

    monkeypatch.setattr(compile_call, "capture_few_layers", noted)
    return seen


def loss_and_gradients(call: Callable[..., Any], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(data()).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_eagers(compiled: CompiledModule, model: nn.Module) -> None:
    got, expected = loss_and_gradients(compiled, model), loss_and_gradients(model, model)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def assert_whole_capture_alike(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    few = loss_and_gradients(CompiledModule(model), model)
    monkeypatch.setattr(compile_call, "capture_few_layers", lambda *_, **__: None)
    whole = loss_and_gradients(CompiledModule(model), model)
    assert all(map(torch.equal, few, whole))


def test_the_bits_are_those_of_a_whole_capture(
    found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    assert_whole_capture_alike(Stack(), monkeypatch)
    assert found == [True]


def _other_scale(layer: Any) -> None:
    layer.scale = 0.5


def _frozen(layer: Any) -> None:
    layer.linear.requires_grad_(False)


def _evaluated(layer: Any) -> None:
    layer.eval()


def _hooked(layer: Any) -> None:
    layer.register_forward_hook(lambda module, args, result: result * 2)


def _without_bias(layer: Any) -> None:
    layer.linear.bias = None


def _another_module(layer: Any) -> None:
    layer.dropout = nn.Identity()


@pytest.mark.parametrize(
    "change",
    [_other_scale, _frozen, _evaluated, _hooked, _without_bias, _another_module],
)
def test_a_change_of_a_layer_that_was_not_captured_is_seen(
    change: Callable[[Any], None], found: list[bool]
) -> None:
    torch.manual_seed(0)
    model = Stack()
    compiled = CompiledModule(model)
    assert_eagers(compiled, model)
    change(model.blocks[9])
    assert_eagers(compiled, model)
    assert found == [True, False]


def test_a_layer_that_is_added_or_removed_is_seen(found: list[bool]) -> None:
    torch.manual_seed(0)
    model = Stack()
    compiled = CompiledModule(model)
    assert_eagers(compiled, model)
    model.blocks.append(Layer())
    assert_eagers(compiled, model)
    del model.blocks[5]
    assert_eagers(compiled, model)
    assert found == [True, True, True]


def test_weights_and_buffers_are_read_at_each_call(found: list[bool]) -> None:
    torch.manual_seed(0)
    model = Stack()
    compiled = CompiledModule(model)
    assert_eagers(compiled, model)
    layer: Any = model.blocks[9]
    layer.linear.weight = nn.Parameter(torch.randn(4, 4))
    layer.shift = torch.randn(4)
    assert_eagers(compiled, model)
    assert found == [True]


def test_a_weight_that_all_layers_share_is_one(
    found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Stack()
    shared: Any = model.blocks[4]
    for block in model.blocks:
        block.linear = shared.linear
    assert_whole_capture_alike(model, monkeypatch)
    assert found == [True]


def test_weights_that_are_tied_later_have_eagers_gradients() -> None:
    torch.manual_seed(0)
    model = Stack()
    compiled = CompiledModule(model)
    assert_eagers(compiled, model)
    one: Any = model.blocks[4]
    other: Any = model.blocks[9]
    other.linear.weight = one.linear.weight
    assert_eagers(compiled, model)


class Counts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        Layer.calls += 1
        return super().forward(x)


class Remembers(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.was_called = True
        return super().forward(x)


SEEN: list[int] = []


class Appends(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(1)
        return super().forward(x)


class DividesByCount(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.num_blocks()

    def num_blocks(self) -> int:
        return len(self.blocks)


class DoublesIfDeep(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor()

    def factor(self) -> int:
        return 2 if len(self.blocks) > 9 else 1


class DoublesIfLarge(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if len(list(self.parameters())) > 60 else 1)


class AddsNorms(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        for parameter in self.parameters():
            y = y + parameter.square().sum()
        return y


class KnowsThem(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.others = list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(self.others)


class Collected(Layer):
    def forward(self, given: Any) -> Any:
        x, seen = given
        seen.append(2)
        return super().forward(x), seen


class SumsWhatTheyCollect(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = (self.first(x), [])  # type: ignore[assignment]
        for block in self.blocks:
            x = block(x)
        y, seen = x
        return self.last(y) * sum(seen)


class ReturnsAll(Stack):
    def forward(self, x: Tensor) -> Tensor:
        results = []
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            results.append(x)
        return torch.stack(results)


class SharesTwo(Stack):
    def __init__(self) -> None:
        super().__init__()
        one: Any = self.blocks[4]
        other: Any = self.blocks[9]
        other.linear.weight = one.linear.weight


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack(Counts),
        lambda: Stack(Remembers),
        lambda: Stack(Appends),
        DividesByCount,
        DoublesIfDeep,
        DoublesIfLarge,
        AddsNorms,
        KnowsThem,
        lambda: SumsWhatTheyCollect(Collected),
        ReturnsAll,
        SharesTwo,
    ],
)
def test_what_depends_on_the_number_of_layers_has_all_captured(make: Callable[[], Stack]) -> None:
    model = make()
    call = Call.of(model.forward, (data(),), {})
    given = {"reason": "test", "is_guarded": True, "is_of_mode": False}
    assert capture_few_layers(model, call, **given) is None  # type: ignore[arg-type]
