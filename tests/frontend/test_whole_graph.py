"""`frontend: aot`: PyTorch differentiates the captured graph as a whole, with eager's bits and random numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.memory import measured_peak_bytes
from harness.parity import weighted_sum
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.errors import BudgetError, CompileError
from thunder_memsave.ops.location import location
from thunder_memsave.planner.devices import device

AOT = CompileConfig(frontend="aot")
Make = Callable[[], nn.Module]


class Double(torch.autograd.Function):
    """A derivative of its own, which is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def _doubled(x: Tensor) -> Tensor:
    return Double.apply(x)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    """What differs most from a function of numbers: draws, buffers, views that are changed, regions, constants."""

    num_calls: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("num_calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = torch.tensor([1.0, 2.0] * 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.num_calls += 1
        y = self.norm(self.first(x))
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.1)
        y = checkpoint(self._region, y, use_reentrant=False)
        y[:, :4] *= 2
        y[:, 4:].copy_(y[:, 4:].flip(1).clone())
        z = self.second(_doubled(F.dropout(y, 0.3, self.training)))
        return z * self.scale, y.detach().argmax(1), z.mean(0)

    def _region(self, y: Tensor) -> Tensor:
        return F.gelu(y).cumsum(1) + self.mean


class Autocasts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.layer_norm(self.first(x), (16,))
            with torch.autocast("cpu", enabled=False):
                y = y.float().softmax(-1)
            return self.second(y)


class AutocastAround(nn.Module):
    """For a call under autocast: a weight read twice, a product in float32, and a write."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = self.second(y.float()).sin()
            y.mul_(2.0)
        return self.first(y)


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return weighted_sum(output)
    return weighted_sum(output[0]) + output[2].sum()


def _steps(model: nn.Module, run: Callable[..., Any]) -> list[Tensor]:
    """All that two steps leave: losses, gradients and buffers."""
    found: list[Tensor] = []
    torch.manual_seed(1)
    for _ in range(2):
        model.zero_grad()
        loss = _loss(run(torch.randn(4, 8)))
        loss.backward()
        gradients = [torch.empty(0) if p.grad is None else p.grad for p in model.parameters()]
        found += [loss.detach().clone(), *(g.clone() for g in gradients)]
    return [*found, *(b.clone() for b in model.buffers())]


@pytest.mark.parametrize("make", [Net, Autocasts])
def test_two_steps_have_eagers_bits_dropout_and_buffers_included(make: Make) -> None:
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    compiled = CompiledModule(model, config=AOT)
    for ours, theirs in zip(_steps(model, compiled), _steps(eager, eager), strict=True):
        assert torch.equal(ours, theirs)
    assert len(compiled.captures) == 1


def test_autocast_around_a_call_does_not_reach_its_backward() -> None:
    torch.manual_seed(0)
    model = AutocastAround()
    eager = copy.deepcopy(model)

    def under_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return run(x)

        return call

    ours = _steps(model, under_autocast(CompiledModule(model, config=AOT)))
    for value, expected in zip(ours, _steps(eager, under_autocast(eager)), strict=True):
        assert torch.equal(value, expected)


def test_inference_has_eagers_bits() -> None:
    torch.manual_seed(0)
    model = Net()
    model.eval()
    eager = copy.deepcopy(model)
    compiled = CompiledModule(model, config=AOT)
    x = torch.randn(4, 8)
    with torch.no_grad():
        for ours, theirs in zip(compiled(x), eager(x), strict=True):
            assert torch.equal(ours, theirs)
            assert not ours.requires_grad
    assert torch.equal(model.mean, eager.mean)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(F.gelu(layer(x)), 0.1)
        return x.square().mean()


class Planned:
    """A model, after a step with what a plan keeps."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        torch.manual_seed(0)
        self.model, self.x = Deep(), torch.randn(256, 32)
        memory = MemoryConfig(policy="keep_all" if budget_bytes is None else "plan")
        self.planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=budget_bytes)
        self.compiled = CompiledModule(self.model, config=AOT, planner=self.planner)
        self.gradients = self.step()

    def step(self) -> list[Tensor]:
        torch.manual_seed(1)
        self.compiled(self.x).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return gradients


def test_a_budget_is_kept_to_the_byte_and_changes_no_bit() -> None:
    kept = Planned()
    with pytest.raises(BudgetError) as refused:
        Planned(1)
    planned = Planned(refused.value.smallest_bytes)
    call = planned.planner.calls[-1]
    assert call.plan is not None
    assert call.plan.recompute_us > 0
    assert all(map(torch.equal, planned.gradients, kept.gradients))
    held_bytes = sum(call.program.storages[s].nbytes for s in call.program.held)
    predicted_bytes = call.profile.peak_bytes - held_bytes - call.memory.other_bytes
    assert measured_peak_bytes(planned.step) == predicted_bytes


def test_operations_of_forward_tell_the_line_and_the_module_that_they_are_from() -> None:
    symbols = Planned().compiled.captures[0].forward_traces[-1].bound_symbols
    places = {location(b) for b in symbols if b.sym.name == "aten_addmm"}
    assert {p.module for p in places if p} == {f"layers.{i}" for i in range(6)}
    assert all("test_whole_graph.py:" in p.source for p in places if p)


class ReadsANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        return kept[kept > 0].sum()


def test_a_refusal_names_the_users_line() -> None:
    with pytest.raises(CompileError, match=r"test_whole_graph\.py:\d+ .*cannot be compiled"):
        CompiledModule(ReadsANumber(), config=AOT)(torch.randn(2, 4))
