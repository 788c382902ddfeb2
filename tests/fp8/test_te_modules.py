"""A model whose own linears compute in fp8 trains to the bit as with TransformerEngine's modules in their place."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness.fabric import make_fabric
from thunder_memsave.fp8.scaling import ScalingState

NUM_STEPS = 6
HISTORY_LEN = 3
LEARNING_RATE = 0.5
RECIPES = [
    ("DelayedScaling", {"amax_history_len": HISTORY_LEN}, {"amax_history_len": HISTORY_LEN}),
    ("Float8CurrentScaling", {}, {"recipe": "current"}),
    ("Float8BlockScaling", {}, {"recipe": "block"}),
]
Shapes = Sequence[tuple[int, int]]
SHAPES: Shapes = ((64, 32), (48, 64), (16, 48))
SHAPES_OF_MX: Shapes = ((64, 32), (96, 64), (32, 96))
"""TransformerEngine refuses others in MXFP8, and numbers of rows that are no multiple of 32."""


def batches(num_rows: int = 16) -> list[Tensor]:
    """Return batches of growing magnitude, so that scales change."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(num_rows, 32, generator=generator) * 3**step).bfloat16()
        for step in range(NUM_STEPS)
    ]


def weights(shapes: Shapes = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(0.1 * torch.randn(shape, generator=generator)).bfloat16() for shape in shapes]


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean().sqrt()


def with_te_modules(
    te: ModuleType, recipe: Any, *, shapes: Shapes = SHAPES, num_rows: int = 16
) -> tuple[list[Tensor], list[Any]]:
    """Weights after training, and the modules."""
    linears = []
    for weight in weights(shapes):
        linear = te.ops.BasicLinear(
            weight.shape[1], weight.shape[0], device="cpu", dtype=torch.bfloat16
        )
        linear.weight.data.copy_(weight)
        linears.append(linear)
    model = nn.Sequential(linears[0], nn.GELU(), linears[1], nn.GELU(), linears[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for x in batches(num_rows):
        with te.autocast(enabled=True, recipe=recipe):
            output = model(x)
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [linear.weight.detach() for linear in linears], linears


def with_own_linears(
    fp8: dict[str, Any], *, shapes: Shapes = SHAPES, num_rows: int = 16
) -> tuple[list[Tensor], nn.Module]:
    """Weights after training, and the model."""
    linears = []
    for weight in weights(shapes):
        linears.append(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
        linears[-1].weight.data.copy_(weight)
    model = nn.Sequential(linears[0], nn.GELU(), linears[1], nn.GELU(), linears[2])
    fabric = make_fabric(precision="bf16-true", fp8={"backend": "transformer_engine", **fp8})
    module, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    for x in batches(num_rows):
        fabric.backward(loss_of(module(x)))
        optimizer.step()
        optimizer.zero_grad()
    return [linear.weight.detach() for linear in linears], model


@pytest.mark.parametrize(("name", "options", "fp8"), RECIPES)
def test_weights_are_those_of_transformer_engines_modules_with_emulated_kernels(
    transformer_engine: ModuleType, name: str, options: dict[str, Any], fp8: dict[str, Any]
) -> None:
    recipes = importlib.import_module("transformer_engine.common.recipe")
    # Scales by its schedule in python; its fused kernel rounds once less.
    with patch.dict(os.environ, {"NVTE_UNFUSED_FP8_UPDATE": "1"}):
        expected, linears = with_te_modules(transformer_engine, getattr(recipes, name)(**options))
    result, model = with_own_linears(fp8)
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(result[0], weights()[0])
    states = [m for m in model.modules() if isinstance(m, ScalingState)]
    assert len(states) == (3 if name == "DelayedScaling" else 0)
    for state, linear in zip(states, linears, strict=False):
        check_equal_state(state, linear)


def test_in_mxfp8_weights_are_those_of_its_modules_too_with_emulated_kernels(
    transformer_engine_on_blackwell: ModuleType,
) -> None:
    recipes = importlib.import_module("transformer_engine.common.recipe")
    expected, _ = with_te_modules(
        transformer_engine_on_blackwell,
        recipes.MXFP8BlockScaling(),
        shapes=SHAPES_OF_MX,
        num_rows=64,
    )
    result, _ = with_own_linears({"recipe": "mxfp8"}, shapes=SHAPES_OF_MX, num_rows=64)
    for ours, theirs, before in zip(result, expected, weights(SHAPES_OF_MX), strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours, before)


def test_a_linear_in_mxfp8_has_the_loss_and_gradients_of_te_ops_linear_with_emulated_kernels(
    transformer_engine_on_blackwell: ModuleType,
) -> None:
    te = transformer_engine_on_blackwell
    recipe = importlib.import_module("transformer_engine.common.recipe").MXFP8BlockScaling()
    torch.manual_seed(0)
    # `te.Linear` itself refuses tensors that are not on CUDA.
    own, theirs = nn.Linear(96, 64), te.ops.Linear(96, 64, device="cpu", dtype=torch.float32)
    theirs.load_state_dict(own.state_dict(), strict=False)
    module = make_fabric(
        sharding="none", fp8={"backend": "transformer_engine", "recipe": "mxfp8"}
    ).setup(nn.Sequential(own))
    inputs = [torch.randn(2, 32, 96).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    found = []
    for linear, x in zip((module, theirs), inputs, strict=True):
        with te.autocast(enabled=True, recipe=recipe):
            loss = linear(x).square().mean()
        loss.backward()
        parameters = own.parameters() if linear is module else theirs.parameters()
        found.append([loss.detach(), x.grad, *(p.grad for p in parameters)])
    assert sorted(tuple(t.shape) for t in found[0]) == [(), (2, 32, 96), (64,), (64, 96)]
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def check_equal_state(ours: ScalingState, linear: Any) -> None:
    for mode, history, scale in (
        ("forward", ours.forward_amax_history, ours.forward_scale),
        ("backward", ours.backward_amax_history, ours.backward_scale),
    ):
        state = linear._fp8_metas[mode]["scaling_fwd" if mode == "forward" else "scaling_bwd"]
        assert torch.equal(history, state.amax_history)
        assert torch.equal(scale, state.scale)
        assert not torch.equal(scale, torch.ones_like(scale))
