"""A parameter that changes in place is seen by the next call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thunder_memsave.compat import stale_tensor_guards
from thunder_memsave.compiler.compiled_module import CompiledModule


def half_frozen() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    return model


def test_a_parameter_that_is_trained_from_now_on_gets_its_gradient() -> None:
    model = half_frozen()
    compiled = CompiledModule(model)
    for _ in range(3):  # the guards take note of the dictionaries once they have held
        compiled(torch.randn(2, 4)).sum().backward()
    model[1].requires_grad_(True)
    compiled(torch.randn(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_parameter_of_another_shape_is_captured_anew() -> None:
    model = half_frozen()
    compiled = CompiledModule(model)
    for _ in range(3):
        compiled(torch.randn(2, 4)).sum().backward()
    model[1].weight.data, model[1].bias.data = torch.randn(3, 4), torch.randn(3)
    assert compiled(torch.randn(2, 4)).shape == (2, 3)


@pytest.mark.skipif(not stale_tensor_guards.IS_NEEDED, reason="torch 2.13 and newer ask")
def test_canary_torch_compile_does_not_see_it() -> None:
    model = half_frozen()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        compiled(torch.randn(2, 4)).sum().backward()
    model[1].requires_grad_(True)
    compiled(torch.randn(2, 4)).sum().backward()
    assert model[1].weight.grad is None
