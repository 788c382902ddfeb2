"""A weight's gradient is computed before that of its layer's input, with the same bits and less memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.traces import fake_ranks, unlimited_planner
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler import joint_steps
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.devices import device
from thunder_memsave.sharding.rows import shard_module

TOKENS, WIDTH, HIDDEN = 64, 8, 256


class Mlp(nn.Module):
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=bias)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * 2.0).square().sum()


class Shared(nn.Module):
    """A weight that is read twice, one that is frozen, and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(F.gelu(self.one(self.one(x))))
        return (x.mT @ x).sin().sum() + self.one(x).sum()


@contextmanager
def as_recorded() -> Iterator[None]:
    with patch.object(joint_steps, "weight_gradients_first", lambda trace: trace):
        yield


def stepped(model: nn.Module, policy: Any = "keep_all") -> tuple[list[Tensor], list[str], int]:
    """Return the gradients of a step, the operators of backward with their operands, and the predicted peak."""
    planner = MemoryPlanner(MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None)
    module = CompiledModule(model, planner=planner)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    module(x).backward()
    (call,) = planner.calls
    gradients = [p.grad for p in (*model.parameters(), x) if p.grad is not None]
    symbols = module.captures[-1].backward_traces[-1].bound_symbols
    found = [b.sym.name for b in symbols]
    return gradients, found, call.profile.peak_bytes


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
@pytest.mark.parametrize("make", [lambda: Mlp(bias=True), lambda: Mlp(bias=False), Shared])
def test_bits_and_operators_stay(make: Any, policy: Any) -> None:
    found, operators, _ = stepped(make(), policy)
    with as_recorded():
        expected, before, _ = stepped(make(), policy)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)
    assert sorted(operators) == sorted(before)


def test_the_input_of_a_layer_with_bias_is_not_held_beside_its_gradient() -> None:
    *_, nbytes = stepped(Mlp(bias=True))
    with as_recorded():
        *_, before = stepped(Mlp(bias=True))
    assert before - nbytes >= TOKENS * HIDDEN * 4 - 4 * HIDDEN * WIDTH * 4


def test_layers_without_bias_have_that_order_already() -> None:
    model = Mlp(bias=False)
    _, operators, nbytes = stepped(model)
    with as_recorded():
        assert stepped(model)[1:] == (operators, nbytes)


def test_weights_that_are_gathered_keep_the_order() -> None:
    """Else a gathered weight would be held beside its whole gradient."""

    def operators() -> list[str]:
        model = Mlp(bias=True)
        with fake_ranks(2, mode="zero3") as data_parallel:
            shard_module(model, data_parallel)
            planner = unlimited_planner(MemoryConfig(), data_parallel)
            module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
            module(torch.ones(TOKENS, WIDTH))
        return [b.sym.name for b in module.captures[-1].backward_traces[-1].bound_symbols]

    with as_recorded():
        expected = operators()
    assert operators() == expected
