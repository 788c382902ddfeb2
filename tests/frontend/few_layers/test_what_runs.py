"""What runs after a capture of few layers is what all of them compute, and is captured anew where one changes."""

from __future__ import annotations

from collections.abc import Callable
from operator import delitem, setitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from thunder_memsave.compiler import compile_call
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.frontend.calls import Call
from thunder_memsave.frontend.few_layers import capture as few_layers
from thunder_memsave.frontend.few_layers.capture import capture_few_layers
from thunder_memsave.frontend.few_layers.plain_loops import longest_list

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


@pytest.fixture(autouse=True)
def these_layers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers of this file be captured like those of transformers."""
    monkeypatch.setattr(few_layers, "KNOWN_FOLDERS", [str(Path(__file__).parent)])


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


def assert_eagers_after_each(model: Any, *changes: Callable[[Any], None]) -> None:
    """Compare one compiled module with eager PyTorch, at first and after each change of the model."""
    compiled = CompiledModule(model)
    assert_eagers(compiled, model)
    for change in changes:
        change(model)
        assert_eagers(compiled, model)


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


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=COUNT,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        adapters = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.2)
        self.model: Any = get_peft_model(LlamaForCausalLM(config), adapters)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.argsort(dim=-1)
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def test_layers_with_adapters_have_the_bits_of_a_whole_capture(
    found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Scored()
    assert_whole_capture_alike(model, monkeypatch)
    assert found == [True]


def _other_scale(layer: Any) -> None:
    layer.scale = 0.5


def _frozen(layer: Any) -> None:
    layer.linear.requires_grad_(False)


def _evaluated(layer: Any) -> None:
    layer.eval()


def _hooked(layer: Any) -> None:
    layer.register_forward_hook(lambda module, args, result: result * 2)


def _hooked_inside(layer: Any) -> None:
    layer.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _hooked_with_keywords(layer: Any) -> None:
    layer.norm.register_forward_hook(
        lambda module, args, named, result: result * 2, with_kwargs=True
    )


def _without_bias(layer: Any) -> None:
    layer.linear.bias = None


def _another_module(layer: Any) -> None:
    layer.dropout = nn.Identity()


@pytest.mark.parametrize(
    "change",
    [
        *(_other_scale, _frozen, _evaluated, _without_bias, _another_module),
        *(_hooked, _hooked_inside, _hooked_with_keywords),
    ],
)
def test_a_change_of_a_layer_that_was_not_captured_is_seen(
    change: Callable[[Any], None], found: list[bool]
) -> None:
    torch.manual_seed(0)
    assert_eagers_after_each(Stack(), lambda model: change(model.blocks[9]))
    assert found == [True, False]


def test_a_hook_that_is_removed_is_called_no_more(found: list[bool]) -> None:
    torch.manual_seed(0)
    handles: list[Any] = []

    def add(model: Any) -> None:
        double = model.blocks[9].linear.register_forward_hook(
            lambda module, args, result: result * 2
        )
        handles.append(double)

    assert_eagers_after_each(Stack(), add, lambda _: handles.pop().remove())
    assert found == [True, False]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = Stack()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_hooks_of_a_model_that_takes_the_place_of_another_are_seen(found: list[bool]) -> None:
    torch.manual_seed(0)

    def replace_inner(model: Any) -> None:
        model.inner = Stack()
        _hooked_inside(model.inner.blocks[9])

    assert_eagers_after_each(Outer(), lambda model: setattr(model, "inner", Stack()), replace_inner)
    assert found == [True, False]


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def test_a_model_without_the_list_may_take_the_place_of_another(found: list[bool]) -> None:
    torch.manual_seed(0)
    outermost = Outer()
    outermost.inner = Outer()
    change: list[Callable[[Any], None]] = [lambda model: setattr(model, "inner", Other())]
    assert_eagers_after_each(outermost, *change)
    assert found == [True, False]


def test_the_reason_for_a_new_capture_names_the_list_of_layers() -> None:
    model = Stack()
    captured = capture_few_layers(
        model, Call.of(model.forward, (data(),), {}), reason="", is_guarded=True, is_of_mode=False
    )
    assert captured is not None
    _hooked_inside(model.blocks[9])
    reason = captured.why_not(Call.of(model.forward, (data(),), {}))
    assert reason == "a module in blocks got a hook, or is another one"


def test_a_layer_that_is_added_or_removed_is_seen(found: list[bool]) -> None:
    torch.manual_seed(0)
    assert_eagers_after_each(
        Stack(), lambda model: model.blocks.append(Layer()), lambda model: delitem(model.blocks, 5)
    )
    assert found == [True, True, True]


def test_weights_and_buffers_are_read_at_each_call(found: list[bool]) -> None:
    torch.manual_seed(0)

    def change(model: Any) -> None:
        model.blocks[9].linear.weight = nn.Parameter(torch.randn(4, 4))
        model.blocks[9].shift = torch.randn(4)

    assert_eagers_after_each(Stack(), change)
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

    def tie(model: Any) -> None:
        model.blocks[9].linear.weight = model.blocks[4].linear.weight

    assert_eagers_after_each(Stack(), tie)


class ReadsDicts(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        self.scales = {"a": 1.0, "b": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        for name, branch in self.branches.items():
            x = x + branch(x) * self.scales[name]
        for scale in self.scales.values():
            x = x * scale
        return super().forward(x)


def test_dictionaries_of_a_layer_that_was_not_captured_are_guarded(found: list[bool]) -> None:
    torch.manual_seed(0)
    assert_eagers_after_each(
        Stack(ReadsDicts),
        lambda model: setitem(model.blocks[9].scales, "b", 0.25),
        lambda model: delitem(model.blocks[9].branches, "a"),
    )
    assert found == [True, False, False]


def _replaced(model: Any) -> None:
    model.blocks[9] = Layer()


def _replaced_linear(model: Any) -> None:
    model.blocks[9].linear = nn.Linear(4, 4)


def _swapped(model: Any) -> None:
    model.blocks[3], model.blocks[9] = model.blocks[9], model.blocks[3]


def _reversed(model: Any) -> None:
    model.blocks = nn.ModuleList(reversed(list(model.blocks)))


def _all_replaced(model: Any) -> None:
    model.blocks = Stack().blocks


@pytest.mark.parametrize(
    "change", [_replaced, _replaced_linear, _swapped, _reversed, _all_replaced]
)
def test_modules_that_are_replaced_by_equal_ones_are_read(
    change: Callable[[Any], None], found: list[bool]
) -> None:
    torch.manual_seed(0)
    assert_eagers_after_each(Stack(), change)
    assert found[0]


class Shifted(Layer):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + shift)


class OfConfig(Stack):
    def __init__(self) -> None:
        super().__init__(Shifted)
        self.config = SimpleNamespace(num=COUNT, layer_types=["full"] * COUNT)

    def forward(self, x: Tensor) -> Tensor:
        shifts = {"full": self.first(x), "sliding": self.first(-x)}
        x = self.first(x)
        for i, block in enumerate(self.blocks[: self.config.num]):
            x = block(x, shifts[self.config.layer_types[i]])
        return self.last(x)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num", 10), ("layer_types", ["full"] * 9 + ["sliding"] + ["full"] * 8)],
)
def test_a_changed_configuration_is_seen(name: str, value: Any, found: list[bool]) -> None:
    torch.manual_seed(0)
    assert_eagers_after_each(OfConfig(), lambda model: setattr(model.config, name, value))
    assert found == [True, False]


def test_one_type_of_layers_is_changed_in_place(found: list[bool]) -> None:
    torch.manual_seed(0)
    assert_eagers_after_each(
        OfConfig(), lambda model: setitem(model.config.layer_types, 9, "sliding")
    )
    assert found == [True, False]


def test_code_that_nobody_knows_has_all_layers_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such code may pass a counter from layer to layer that only matters after many."""
    monkeypatch.setattr(few_layers, "KNOWN_FOLDERS", [])
    model = Stack()
    call = Call.of(model.forward, (data(),), {})
    given: Any = {"reason": "test", "is_of_mode": False}
    assert capture_few_layers(model, call, is_guarded=True, **given) is None
    assert capture_few_layers(model, call, is_guarded=False, **given) is not None  # for a plan


class Skips(nn.ModuleList):
    def __iter__(self) -> Any:
        return iter(list(self._modules.values())[:10])


class OwnList(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = Skips(self.blocks)


def _of_instance() -> nn.Module:
    model: Any = Stack()
    model.forward = lambda x: model.last(model.first(x))
    return model


@pytest.mark.parametrize("make", [OwnList, _of_instance])
def test_lists_and_loops_of_another_kind_are_captured_whole(make: Callable[[], nn.Module]) -> None:
    assert longest_list(make()) is None


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


class Around(nn.Module):
    """Scales what a stack computes by a number that depends on the number of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stack(x)
        return y * self.factor()

    def factor(self) -> float:
        raise NotImplementedError


class DividesByCount(Around):
    def factor(self) -> float:
        return 1 / len(self.stack.blocks)


class DoublesIfDeep(Around):
    def factor(self) -> float:
        return 2.0 if len(self.stack.blocks) > 9 else 1.0


class DoublesIfLarge(Around):
    def factor(self) -> float:
        return 2.0 if len(list(self.parameters())) > 60 else 1.0


class DoublesIfManyModules(Around):
    def factor(self) -> float:
        return 2.0 if len(list(self.stack.children())) > 2 else 1.0


class KnowsThem(Around):
    def __init__(self) -> None:
        super().__init__()
        self.others = list(self.stack.blocks)

    def factor(self) -> float:
        return 2.0 if len(self.others) > 9 else 1.0


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
        DoublesIfManyModules,
        KnowsThem,
        lambda: SumsWhatTheyCollect(Collected),
        ReturnsAll,
        SharesTwo,
    ],
)
def test_what_depends_on_the_number_of_layers_has_all_captured(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    assert isinstance(model, ReturnsAll) or longest_list(model) is not None
    call = Call.of(model.forward, (data(),), {})
    given = {"reason": "test", "is_guarded": True, "is_of_mode": False}
    assert capture_few_layers(model, call, **given) is None  # type: ignore[arg-type]
