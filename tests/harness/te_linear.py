"""One linear for 20 steps by TransformerEngine's own functions, to compare bits with."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NUM_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Step:
    """The inputs of one step of a linear with a bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    grad: Tensor


@dataclass(frozen=True, kw_only=True)
class Result:
    """The results of one step."""

    y: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    state: Sequence[Tensor] = ()


def steps(num_inputs: int = 144) -> Iterator[Step]:
    """Inputs that grow and shrink by orders of magnitude, vanish, and hold an infinity and a NaN."""
    weight, bias = torch.randn(160, num_inputs).bfloat16(), torch.randn(160).bfloat16()
    for step in range(NUM_STEPS):
        size = 10.0 ** ((step % 7) - 3)
        x, grad = torch.randn(2, 16, num_inputs) * size, torch.randn(2, 16, 160) / size
        if step in (4, 5):
            x.zero_()
        if step == 9:
            grad.zero_()
        if step == 12:
            x[0, 3, 5], grad[1, 2, 2] = torch.nan, torch.nan
        if step == 15:
            grad[0, 0, 0] = torch.inf
        yield Step(x=x.bfloat16(), weight=weight * size, bias=bias * size**2, grad=grad.bfloat16())


@dataclass(frozen=True)
class TransformerEngine:
    """A linear by its own functions, with quantisers that its recipe makes."""

    recipe: Any
    states: dict[str, Any] = field(default_factory=dict)

    def run(self, step: Step) -> Result:
        linear = importlib.import_module("transformer_engine.pytorch.ops").BasicLinear
        (of_input, of_weight), (of_grad,) = (
            self.quantizers("forward", 2),
            self.quantizers("backward", 1),
        )
        common = {
            "with_quantized_compute": True,
            "input_quantizer": of_input,
            "weight_quantizer": of_weight,
        }
        with torch.no_grad():
            y, x, weight = linear._functional_forward(
                input=step.x, weight=step.weight, bias=step.bias, dtype=step.x.dtype, **common
            )
            grad_input, grad_weight = linear._functional_backward(
                grad_output=step.grad,
                input=x,
                weight=weight,
                dtype=step.x.dtype,
                grad_output_quantizer=of_grad,
                **common,
            )
        return Result(y=y, grad_input=grad_input, grad_weight=grad_weight, state=self.update())

    def quantizers(self, mode: str, number: int) -> list[Any]:
        quantization = importlib.import_module("transformer_engine.pytorch.quantization")
        if mode not in self.states:
            self.states[mode] = quantization.RecipeState.create(
                self.recipe, mode=mode, num_quantizers=number
            )
        return self.states[mode].make_quantizers()

    def update(self) -> list[Tensor]:
        """Run its Python schedule, once per step; return the amax histories and scales after it."""
        if not self.recipe.delayed():
            return []
        for mode, state in self.states.items():
            te_update(state.amax_history, state.scale, self.recipe, forward=mode == "forward")
        return [t.clone() for s in self.states.values() for t in (s.amax_history, s.scale)]


def te_update(history: Tensor, scale: Tensor, recipe: Any, *, forward: bool) -> None:
    quantization = importlib.import_module("transformer_engine.pytorch.quantization")
    largest = quantization.get_fp8_max(recipe, forward)
    quantization._amax_and_scale_update(history, scale, largest, recipe)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bits, so that NaN equals NaN."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))
    )


def assert_same(result: Result, expected: Result, step: int) -> None:
    for name in ("y", "grad_input", "grad_weight"):
        assert same_bits(getattr(result, name), getattr(expected, name)), f"{name} of step {step}"
    assert len(result.state) == len(expected.state)
    for ours, theirs in zip(result.state, expected.state, strict=True):
        assert same_bits(ours, theirs), f"the scaling state after step {step}"


def recipe_named(name: str, **options: Any) -> Any:
    return getattr(importlib.import_module("transformer_engine.common.recipe"), name)(**options)
