"""Every operator with a kernel of ours computes the same if nothing is differentiated, planned or not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.fp8_linears import fp8_module
from harness.operations import COLUMNS, ROWS, SAMPLES
from harness.parity import assert_trees_close
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.devices import device

HALF = torch.bfloat16
"""A dtype other than the parameters'."""


class Cube(torch.autograd.Function):
    """A user's operation, composed of others that the executors must claim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.softmax(x * x * x, dim=-1, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.to(x.dtype) * x


def dropped(x: Tensor) -> Tensor:
    heads = x.view(1, 2, ROWS, COLUMNS // 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=1.0)


OTHERS: dict[str, Callable[..., Tensor]] = {
    "softmax_in_its_own_dtype": lambda x: F.softmax(x, dim=-1, dtype=x.dtype),
    "softmax_in_fp64": lambda x: F.softmax(x, dim=-1, dtype=torch.float64),
    "softmax_of_half_in_fp32": lambda x: F.softmax(x.to(HALF), dim=-1, dtype=torch.float32),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "log_softmax_in_fp64": lambda x: F.log_softmax(x, dim=-1, dtype=torch.float64),
    "sum_in_fp64": lambda x: x.sum(-1, dtype=torch.float64),
    "cumsum_in_fp64": lambda x: x.cumsum(-1, dtype=torch.float64),
    "attention_with_dropout": dropped,
    "autograd_function": Cube.apply,
}
"""Beside those of the table."""

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **{name: sample.run for name, sample in SAMPLES.items()},
    **OTHERS,
}

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "frozen": torch.enable_grad,
}


class Operations(nn.Module):
    """Applies each to values of its own, and trains a factor that comes later."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        shapes = {n: SAMPLES[n].shapes if n in SAMPLES else [(ROWS, COLUMNS)] for n in names}
        self.values = nn.ModuleDict(
            {name: nn.ParameterList(map(torch.randn, of)) for name, of in shapes.items()}
        )
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self) -> dict[str, Tensor]:
        results = {}
        for name, values in self.values.items():
            assert isinstance(values, nn.ParameterList)
            results[name] = OPERATIONS[name](*values) * self.factor
        return results


def planner() -> MemoryPlanner:
    return MemoryPlanner(MemoryConfig(policy="keep_all"), device=device("cpu"), budget_bytes=None)


@pytest.mark.parametrize("mode", MODES)
def test_operators_without_gradients_are_planned_and_compute_what_eager_does(mode: str) -> None:
    torch.manual_seed(0)
    model = Operations(OPERATIONS)
    model.values.requires_grad_(mode != "frozen")
    compiled = CompiledModule(model, planner=planner())
    with MODES[mode]():
        assert_trees_close(compiled(), model(), rtol=1e-6, atol=1e-6)
    assert compiled.planner is not None
    assert (compiled.planner.calls[-1].plan is None) == (mode != "frozen")


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_fp8_linears_without_gradients_are_planned_and_compute_what_those_with_gradients_do(
    recipe: str,
) -> None:
    torch.manual_seed(0)
    compiled = fp8_module(nn.Linear(128, 128).eval(), recipe=recipe, planner=planner())
    x = torch.randn(128, 128)
    differentiated = compiled(x).detach()
    for mode in ("no_grad", "inference_mode"):
        with MODES[mode]():
            assert torch.equal(compiled(x), differentiated)
    assert compiled.planner is not None
    assert [call.plan is None for call in compiled.planner.calls] == [False, True, True]
