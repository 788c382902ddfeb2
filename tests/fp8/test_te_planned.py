"""Recomputation and a second backward change no bit of what TransformerEngine's kernels compute, nor of its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import te_kernels
from harness.fp8_linears import fp8_module, linears_of, state_of
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError
from thunder_memsave.measure.devices import device_at
from thunder_memsave.settings.value_kinds import BytesOrFraction


def deep_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(3))
    )


def compiled(budget_bytes: int | None, **options: Any) -> CompiledModule:
    """Compile a module with fp8 linears by TransformerEngine, within a budget."""
    budget = None if budget_bytes is None else BytesOrFraction(budget_bytes)
    planner = MemoryPlanner(
        MemoryConfig(budget=budget) if budget is not None else MemoryConfig(),
        device=device_at(torch.device("cpu")),
        budget_bytes=budget_bytes,
    )
    return fp8_module(deep_model(), backend="transformer_engine", planner=planner, **options)


@dataclass(frozen=True, kw_only=True)
class Step:
    """The second of two, so that nothing is measured in it."""

    gradients: list[Tensor]
    again: list[Tensor]
    """Gradients of a second backward through the same graph."""
    state: dict[str, Tensor]
    num_quantized: int


def step(module: CompiledModule) -> Step:
    parameters = list(module.parameters())
    for number in range(2):
        te_kernels.calls.clear()
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(number))
        loss = module(x).square().mean()
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        num_quantized = len(te_kernels.calls.quantized)
        again = torch.autograd.grad(loss, parameters)
    return Step(
        gradients=list(gradients),
        again=list(again),
        state=state_of(linears_of(module)),
        num_quantized=num_quantized,
    )


@pytest.mark.usefixtures("transformer_engine")
def test_recomputing_within_the_smallest_budget_changes_no_bits_with_emulated_kernels() -> None:
    with pytest.raises(BudgetError) as error:
        compiled(1)(torch.randn(64, 32))
    free, tight = step(compiled(None)), step(compiled(error.value.smallest_bytes))
    # Each of 6 linears quantises its input, its weight and its gradient; the first two again where not kept.
    assert tight.num_quantized > 6 * 3
    assert free.num_quantized == 6 * 3
    for ours, theirs in zip(tight.gradients, free.gradients, strict=True):
        assert torch.equal(ours, theirs)
    assert tight.state.keys() == free.state.keys()
    assert all(torch.equal(value, free.state[name]) for name, value in tight.state.items())
    assert any(value.any() for name, value in free.state.items() if "history" in name)


@pytest.mark.usefixtures("transformer_engine_on_blackwell")
def test_so_it_is_in_mxfp8_with_emulated_kernels() -> None:
    with pytest.raises(BudgetError) as error:
        compiled(1, recipe="mxfp8")(torch.randn(64, 32))
    free = step(compiled(None, recipe="mxfp8"))
    tight = step(compiled(error.value.smallest_bytes, recipe="mxfp8"))
    # Each of 6 linears casts its input once, in both directions, and its weight and gradient once in each; nobody wants
    # the first one's gradient of the input.
    assert free.num_quantized == 6 * 5 - 2
    assert tight.num_quantized > free.num_quantized
    for ours, theirs in zip(tight.gradients, free.gradients, strict=True):
        assert torch.equal(ours, theirs)
    for first, second in zip(free.gradients, free.again, strict=True):
        assert torch.equal(first, second)


@pytest.mark.usefixtures("transformer_engine")
def test_a_second_backward_changes_no_bits_with_emulated_kernels() -> None:
    found = step(compiled(None))
    for first, second in zip(found.gradients, found.again, strict=True):
        assert torch.equal(first, second)
