"""Nothing is computed, transposed or kept for frozen weights: counted in the traces that run."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from harness.fp8_linears import EagerTwin, Shape, fp8_module, linears_of, ops, results, saved
from harness.models import llama, token_batch
from thunder_memsave.compiler.compiled_module import CompiledModule

ROWS = 24
"""No linear has as many features."""


class Stack(nn.Module):
    """Linears of different sizes with a norm before each."""

    def __init__(self, sizes: tuple[int, ...] = (32, 80, 48, 112, 64, 16)) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(n) for n in sizes[:-1])
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = linear(torch.tanh(norm(x)))
        return x.square().mean()


def alternating() -> nn.Module:
    model = Stack()
    for linear in list(model.linears)[::2]:
        linear.requires_grad_(False)
    return model


def frozen_first_half() -> nn.Module:
    model = Stack()
    for part in (*list(model.norms)[:3], *list(model.linears)[:3]):
        part.requires_grad_(False)
    return model


def frozen_but_the_norms() -> nn.Module:
    model = Stack()
    model.linears.requires_grad_(False)
    return model


def frozen_weights_of_trained_biases() -> nn.Module:
    model = Stack()
    for linear in model.linears:
        assert isinstance(linear, nn.Linear)
        linear.weight.requires_grad_(False)
    return model


def adapted(**settings: Any) -> nn.Module:
    config = peft.LoraConfig(r=16, lora_dropout=0.0, task_type="CAUSAL_LM", **settings)
    base = llama(1, vocab_size=112, intermediate_size=80, num_key_value_heads=4)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


STACKS: dict[str, Callable[[], nn.Module]] = {
    "everything trained": Stack,
    "alternating": alternating,
    "frozen first half": frozen_first_half,
    "all but norms": frozen_but_the_norms,
    "biases only": frozen_weights_of_trained_biases,
}
ADAPTED: dict[str, Callable[[], nn.Module]] = {
    "lora on q and v": lambda: adapted(target_modules=["q_proj", "v_proj"]),
    "lora on all": lambda: adapted(target_modules="all-linear"),
    "dora": lambda: adapted(target_modules=["q_proj", "v_proj"], use_dora=True),
}
MODELS = {**STACKS, **ADAPTED}


def batch(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, Stack):
        return {"input_ids": torch.randn(3, 8, 32)}
    tokens = token_batch(3, 8)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(result: Any) -> Tensor:
    loss = result if isinstance(result, Tensor) else result.loss
    assert isinstance(loss, Tensor)
    return loss


@dataclass(frozen=True)
class Run:
    """One call of one linear: its sizes, and the gradients that eager PyTorch needs."""

    rows: int
    in_features: int
    out_features: int
    wants_grad_input: bool
    wants_grad_weight: bool


def runs_in_eager(module: CompiledModule, inputs: dict[str, Tensor]) -> list[Run]:
    found: list[Run] = []

    def note(linear: nn.Module, args: tuple[Tensor]) -> None:
        assert isinstance(linear, nn.Linear)
        sizes = (args[0].numel() // linear.in_features, linear.in_features, linear.out_features)
        found.append(Run(*sizes, args[0].requires_grad, linear.weight.requires_grad))

    linears = [f.linear for f in linears_of(module).by_name.values()]
    hooks = [linear.register_forward_pre_hook(note) for linear in linears]
    module.module(**inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_only_the_gradients_that_are_wanted_are_computed(kind: str) -> None:
    model = MODELS[kind]()
    module, inputs = fp8_module(model), batch(model)
    runs = runs_in_eager(module, inputs)
    loss_of(module(**inputs))
    (compiled,) = module.captures
    forward, backward = compiled.forward_traces[-1], compiled.backward_traces[-1]
    products: Counter[Shape] = Counter()
    transposed: Counter[Shape] = Counter()
    kept: Counter[Shape] = Counter()
    # DoRA also adapts the unit matrix, and detaches what comes out.
    differentiated = [run for run in runs if run.rows == ROWS]
    for run in differentiated:
        if run.wants_grad_input:
            products[run.rows, run.in_features] += 1
        if run.wants_grad_input and run.wants_grad_weight:
            transposed[run.in_features, run.out_features] += 1
            kept[run.out_features, run.in_features] += 1
        if run.wants_grad_weight:
            products[run.out_features, run.in_features] += 1
            transposed[run.out_features, run.rows] += 1  # of the gradient
            transposed[run.in_features, run.rows] += 1
            kept[run.rows, run.in_features] += 1
    assert results(backward, "gemm") == products
    assert results(backward, "transpose") == transposed
    num_read = sum(r.wants_grad_input or r.wants_grad_weight for r in differentiated)
    assert len(ops(backward, "quantize")) == num_read
    assert saved(compiled).fp8 == kept
    num_trained = sum(r.wants_grad_weight for r in runs)
    assert len(ops(forward, "quantize")) == len(runs) + num_trained
    assert len(ops(forward, "gemm")) == len(runs)
    assert not ops(forward, "transpose")


@pytest.mark.parametrize("kind", STACKS)
def test_gradients_of_biases_are_computed_where_they_are_trained(kind: str) -> None:
    model = MODELS[kind]()
    module, inputs = fp8_module(model), batch(model)
    module(**inputs)
    backward = module.captures[0].backward_traces[-1]
    sums = Counter(
        tuple(b.flat_proxy_outs[0].shape)
        for b in backward.bound_symbols
        if b.sym.name == "sum" and len(b.flat_proxy_args[0].shape) == 2
    )
    biases = [m.bias for m in model.modules() if isinstance(m, nn.Linear)]
    assert sums == Counter(tuple(b.shape) for b in biases if b.requires_grad)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("kind", STACKS)
def test_the_results_are_those_of_computing_everything(kind: str, recipe: str) -> None:
    model = MODELS[kind]()
    module = fp8_module(model, recipe=recipe)
    twin = EagerTwin(module)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5)
        for m in (model, twin.model)
    ]
    for _ in range(3):
        inputs = batch(model)
        ours, theirs = loss_of(module(**inputs)), loss_of(twin(**inputs))
        assert torch.equal(ours, theirs)
        ours.backward()
        theirs.backward()
        assert_equal_gradients(model, twin.model)
        for optimizer, linears in zip(optimizers, (linears_of(module), twin.linears), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            linears.update(None)


def assert_equal_gradients(model: nn.Module, other: nn.Module) -> None:
    """Compare the gradients of all trained parameters of `model`; at least one is not zero."""
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if p.requires_grad:
            assert p.grad is not None, name
            assert q.grad is not None, name
            assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_get_the_gradients_that_they_get_where_all_weights_are_trained(kind: str) -> None:
    """Under `current`, frozen weights are scaled like trained ones."""
    model = ADAPTED[kind]()
    everything = copy.deepcopy(model)
    everything.requires_grad_(True)
    inputs = batch(model)
    for each in (model, everything):
        loss_of(fp8_module(each, recipe="current")(**inputs)).backward()
    assert_equal_gradients(model, everything)


def test_frozen_weights_are_quantised_once_and_again_when_they_were_written_to() -> None:
    model = Stack()
    model.linears.requires_grad_(False)
    module, inputs = fp8_module(model), batch(model)
    linear = linears_of(module).by_name["linears.1"]
    first = module(**inputs)
    quantized = linear.read("weight")
    module(**inputs)
    assert linear.read("weight") is quantized
    with torch.no_grad():
        model.linears[1].weight.mul_(-1)  # type: ignore[operator]
    assert not torch.equal(module(**inputs), first)
    assert torch.equal(linear.read("weight").float(), -quantized.float())


def test_a_frozen_weight_whose_input_needs_no_gradient_has_no_transposed_copy() -> None:
    model = Stack()
    model.requires_grad_(False)
    model.norms[3].requires_grad_(True)
    module = fp8_module(model)
    module(**batch(model))
    arguments = [a.name for a in module.captures[0].forward_traces[-1].args]
    assert sum(a.endswith("weight_transposed") for a in arguments) == 2  # of linears 3 and 4
