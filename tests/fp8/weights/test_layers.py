"""Linears are chosen to run in fp8, and the others have a reason in the report."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from harness.fp8_linears import fp8_module, linears_of, ops
from harness.models import llama
from thunder_memsave import ConfigError
from thunder_memsave.config import Fp8Config
from thunder_memsave.fp8.compute.linears import choose_linears, is_scaling_state
from thunder_memsave.fp8.weights.layers import choose, report


class Special(nn.Linear):
    pass


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "plain": nn.Linear(32, 48),
            "odd": nn.Linear(32, 40),
            "wide": nn.Linear(32, 32, dtype=torch.float64),
            "special": Special(32, 32),
            "block": nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)),
            "lm_head": nn.Linear(32, 64),
            "norm": nn.LayerNorm(32),
        }
    )


def reasons(module: nn.Module, *skip_modules: str) -> dict[str, str | None]:
    return {c.name: c.reason for c in choose(module, skip_modules=skip_modules)}


def test_each_linear_is_chosen_or_has_a_reason() -> None:
    assert reasons(model(), "lm_head") == {
        "plain": None,
        "odd": "32 -> 40 features are no multiples of 16",
        "wide": "its weight is float64, and fp8 is for float32, bfloat16 and float16",
        "special": "it is a Special, which may compute otherwise than nn.Linear",
        "block.0": None,
        "block.2": None,
        "lm_head": "skip_modules has 'lm_head'",
    }


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recipes_of_blackwell_take_multiples_of_32_alone(recipe: Any) -> None:
    linears = nn.ModuleDict(
        {"a": nn.Linear(32, 48), "b": nn.Linear(48, 32), "c": nn.Linear(32, 64)}
    )
    found = {c.name: c.reason for c in choose_linears(linears, Fp8Config(recipe=recipe))}
    assert found == {
        "a": "32 -> 48 features are no multiples of 32",
        "b": "48 -> 32 features are no multiples of 32",
        "c": None,
    }
    others = {c.reason for c in choose_linears(linears, Fp8Config(recipe="block"))}
    assert others == {None}


def test_the_report_counts_and_names() -> None:
    assert report(choose(model(), skip_modules=["lm_head"])) == (
        "3 of 7 linears run in fp8; not odd: 32 -> 40 features are no multiples of 16; not wide: its weight is "
        "float64, and fp8 is for float32, bfloat16 and float16; not special: it is a Special, which may compute "
        "otherwise than nn.Linear; not lm_head: skip_modules has 'lm_head'."
    )


def test_a_report_of_many_layers_is_short() -> None:
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(10)))
    assert "not 0, 1, 2, 3, 4, 5, 6, 7 and 2 more: 3 -> 3" in report(
        choose(layers, skip_modules=())
    )


@pytest.mark.parametrize(
    ("pattern", "skipped"),
    [
        ("block", {"block.0", "block.2"}),
        ("block.0", {"block.0"}),
        ("0", {"block.0"}),
        ("*l*", {"plain", "special", "block.0", "block.2", "lm_head"}),
    ],
)
def test_a_pattern_names_a_module_by_its_whole_name_or_its_end(
    pattern: str, skipped: set[str]
) -> None:
    found = reasons(model(), pattern)
    assert {n for n, r in found.items() if r == f"skip_modules has {pattern!r}"} == skipped


def test_the_head_of_an_adapted_model_is_skipped_and_its_base_layers_are_not() -> None:
    adapted = peft.get_peft_model(
        llama(1, vocab_size=112),
        peft.LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    found = reasons(adapted, "lm_head")
    attention = "base_model.model.model.layers.0.self_attn"
    assert found["base_model.model.lm_head"] == "skip_modules has 'lm_head'"
    assert found[f"{attention}.q_proj.base_layer"] is None
    assert found[f"{attention}.q_proj.lora_A.default"] == "32 -> 8 features are no multiples of 16"


def test_a_pattern_that_names_nothing_is_refused_but_for_the_default() -> None:
    choose(nn.Sequential(nn.Linear(2, 2)), skip_modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"fp8\.skip_modules has 'blok', which names no module"):
        choose(model(), skip_modules=["blok"])


class Shared(nn.Module):
    """One linear under two names, and two with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = self.a
        self.c = nn.Linear(32, 32)
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_a_shared_linear_has_one_state_and_a_shared_weight_one_for_each_linear() -> None:
    module = fp8_module(Shared())
    module(torch.randn(8, 32)).sum().backward()
    assert list(linears_of(module).by_name) == ["a", "c"]
    arguments = [a.name for a in module.captures[0].forward_traces[-1].args]
    assert sum(a.endswith("forward_scale") for a in arguments) == 2


def test_names_of_scaling_state_are_told_from_others() -> None:
    assert is_scaling_state("a.fp8_scaling.forward_scale")
    assert not is_scaling_state("a.fp8_scaling_of_mine.weight")


class Hooked(nn.Module):
    """A frozen linear, with a weight of another module added to it by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(32, 32, bias=False).requires_grad_(False)
        self.delta = nn.Parameter(torch.randn(32, 32))
        self.base.register_forward_hook(self._add)

    def _add(self, _: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output + nn.functional.linear(inputs[0], self.delta)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        assert isinstance(result, torch.Tensor)
        return result


def test_another_weight_inside_a_linear_is_not_taken_for_its_own() -> None:
    model, x = Hooked(), torch.randn(8, 32)
    nn.init.zeros_(model.base.weight)
    module = fp8_module(model, recipe="current")
    result = module(x)
    torch.testing.assert_close(result, x @ model.delta.t())
    result.sum().backward()
    torch.testing.assert_close(model.delta.grad, x.sum(0).expand(32, 32))
    assert len(ops(module.captures[0].forward_traces[-1], "gemm")) == 1


class Tied(nn.Module):
    """Two linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.head(torch.tanh(self.first(x)))
        assert isinstance(result, torch.Tensor)
        return result


def test_a_skipped_linear_stays_so_when_it_shares_its_weight_with_a_chosen_one() -> None:
    module = fp8_module(Tied(), skip_modules=("head",))
    module(torch.randn(8, 32)).sum().backward()
    assert len(ops(module.captures[0].forward_traces[-1], "gemm")) == 1


class CallsFunction(nn.Module):
    """Reads the weight of its linear, as PEFT's layers may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(weight=self.inner.weight, input=x)


def test_a_function_outside_of_all_linears_is_that_of_its_weight() -> None:
    module = fp8_module(CallsFunction())
    module(torch.randn(8, 32)).sum().backward()
    assert len(ops(module.captures[0].forward_traces[-1], "gemm")) == 1


def test_a_linear_whose_weight_is_computed_is_not_chosen() -> None:
    normed = nn.utils.spectral_norm(nn.Linear(32, 32))
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    assert reasons(nn.ModuleDict({"normed": normed, "parametrized": parametrized})) == {
        "normed": "its weight is computed (spectral_norm or the like), not a parameter of its own",
        "parametrized": "it is a ParametrizedLinear, which may compute otherwise than nn.Linear",
    }
