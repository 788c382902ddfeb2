"""TransformerEngine's own modules under `checkpoint`: its Python is the real one, its kernels are emulated."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thunder_memsave import checkpoint

NUM_STEPS = 5
RECIPES = {
    "delayed": ("DelayedScaling", {"amax_history_len": 3}),
    "current": ("Float8CurrentScaling", {}),
    "block": ("Float8BlockScaling", {}),
}
Bits = list[Tensor]


def plainly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


class Model:
    """Two linears of TransformerEngine's in each of two regions."""

    def __init__(self, te: ModuleType, recipe: str, *, call: Callable[..., Any]) -> None:
        self.te, self.call = te, call
        name, options = RECIPES[recipe]
        self.recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), name)(
            **options
        )
        torch.manual_seed(0)
        self.linears = [
            te.ops.BasicLinear(32, 32, device="cpu", dtype=torch.bfloat16) for _ in range(4)
        ]
        for linear in self.linears:
            nn.init.normal_(linear.weight, std=0.2)
        self.num_calls = 0

    def region(self, x: Tensor, *, first: int) -> Tensor:
        self.num_calls += 1
        return self.linears[first + 1](torch.tanh(self.linears[first](x)))

    def around(self, x: Tensor) -> Tensor:
        """Autocast is outside of the regions."""
        with self.te.autocast(enabled=True, recipe=self.recipe):
            return self.call(self.region, self.call(self.region, x, first=0), first=2)

    def inside(self, x: Tensor) -> Tensor:
        """Each region has its own, whose end updates the scales."""

        def region(x: Tensor, *, first: int) -> Tensor:
            with self.te.autocast(enabled=True, recipe=self.recipe):
                return self.region(x, first=first)

        return self.call(region, self.call(region, x, first=0), first=2)

    def nested(self, x: Tensor) -> Tensor:
        with self.te.autocast(enabled=True, recipe=self.recipe):
            return self.call(
                lambda x: self.call(self.region, self.call(self.region, x, first=0), first=2), x
            )

    def bits(self) -> Bits:
        """Gradients, scales and histories."""
        return [linear.weight.grad.clone() for linear in self.linears] + self.states()

    def states(self) -> Bits:
        found = []
        for linear in self.linears:
            for mode, key in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
                state = linear._fp8_metas[mode][key]
                if hasattr(state, "amax_history"):
                    found += [state.scale.clone(), state.amax_history.clone()]
        return found


def sample(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(16, 32, generator=generator) * 3**step).bfloat16()


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean().sqrt()


def train(model: Model, forward: str) -> list[Bits]:
    results = []
    for step in range(NUM_STEPS):
        loss_of(getattr(model, forward)(sample(step).requires_grad_())).backward()
        results.append(model.bits())
        for linear in model.linears:
            linear.weight.grad = None
    return results


def accumulate(model: Model, order: Sequence[int]) -> list[Bits]:
    """All forwards first: each ends with an update of the scales, so that none are those of the next."""
    results = []
    for _ in range(2):
        losses = [loss_of(model.around(sample(step))) for step in range(len(order))]
        for i in order:
            losses[i].backward()
            results.append(model.bits())
    return results


def assert_same_bits(te: ModuleType, recipe: str, run: Callable[[Model], list[Bits]]) -> None:
    plain, ours = Model(te, recipe, call=plainly), Model(te, recipe, call=checkpoint)
    expected = run(plain)
    _manager().reset()
    measured = run(ours)
    _manager().reset()
    assert ours.num_calls > plain.num_calls
    for a, b in zip(expected, measured, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _manager() -> Any:
    return importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager


@pytest.mark.parametrize("forward", ["around", "inside", "nested"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_and_scales_over_steps_are_those_of_plain_calls_with_emulated_kernels(
    transformer_engine: ModuleType, recipe: str, forward: str
) -> None:
    assert_same_bits(transformer_engine, recipe, lambda m: train(m, forward))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_accumulation_in_any_order_recomputes_with_the_scales_of_its_forward_with_emulated_kernels(
    transformer_engine: ModuleType, order: Sequence[int]
) -> None:
    assert_same_bits(transformer_engine, "delayed", lambda m: accumulate(m, order))


def test_the_scales_of_the_steps_differ_with_emulated_kernels(
    transformer_engine: ModuleType,
) -> None:
    """Otherwise the tests above could not fail."""
    model = Model(transformer_engine, "delayed", call=plainly)
    first, *later = train(model, "around")
    assert all(not torch.equal(first[4], bits[4]) for bits in later)


@pytest.mark.parametrize("forward", ["around", "inside"])
def test_scales_of_other_regions_are_not_rolled_on_by_the_python_update_with_emulated_kernels(
    transformer_engine: ModuleType, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rolls every history that it is called for; the kernel leaves those alone that recorded nothing."""
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    assert_same_bits(transformer_engine, "delayed", lambda m: train(m, forward))


def test_backward_leaves_the_autocast_state_as_it_was_with_emulated_kernels(
    transformer_engine: ModuleType,
) -> None:
    manager = _manager()
    model = Model(transformer_engine, "delayed", call=checkpoint)
    loss = loss_of(model.around(sample(0)))
    before = manager.get_autocast_state()
    loss.backward()
    assert manager.get_autocast_state() == before
    assert not manager.is_fp8_enabled()


def test_a_recompute_that_fails_leaves_scales_as_they_were_with_emulated_kernels(
    transformer_engine: ModuleType,
) -> None:
    model = Model(transformer_engine, "delayed", call=checkpoint)
    train(model, "around")
    with transformer_engine.autocast(enabled=True, recipe=model.recipe):
        y = checkpoint(failing_later(model.linears[0]), sample(0))
    before = model.states()
    with pytest.raises(KeyError, match="mine"):
        loss_of(y).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.states(), strict=True))
    assert "add_fp8_tensors_to_global_buffer" in vars(_manager())


def failing_later(linear: Any) -> Callable[[Tensor], Tensor]:
    num_calls = 0

    def region(x: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        y = linear(linear(x))
        if num_calls == 1:
            return linear(y)
        raise KeyError("mine")

    return region


def test_other_modules_in_the_recompute_are_refused_with_emulated_kernels(
    transformer_engine: ModuleType,
) -> None:
    model = Model(transformer_engine, "delayed", call=checkpoint)
    order = iter([0, 1])
    with transformer_engine.autocast(enabled=True, recipe=model.recipe):
        y = checkpoint(lambda x: model.linears[next(order)](x), sample(0))
    with pytest.raises(RuntimeError, match="ran other fp8 modules, or the same in another order"):
        loss_of(y).backward()


def test_a_second_backward_is_refused_by_transformer_engine_itself_with_emulated_kernels(
    transformer_engine: ModuleType,
) -> None:
    """Its nodes drop what they need (TransformerEngine #990); once this fails, the page on checkpoint can say more."""
    for call in (plainly, checkpoint):
        loss = loss_of(Model(transformer_engine, "current", call=call).around(sample(0)))
        loss.backward(retain_graph=True)
        with pytest.raises(AttributeError, match=r"ctx must have \.tensor_objects"):
            loss.backward()
