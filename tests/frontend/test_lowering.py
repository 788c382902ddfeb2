"""PyTorch differentiates the captured graph as a whole, with eager's bits and random numbers."""

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
from harness.parity import Twins, weighted_sum
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError, CompileError
from thunder_memsave.ops.location import location
from thunder_memsave.planner.devices import device

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
    compiled = CompiledModule(model)
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

    ours = _steps(model, under_autocast(CompiledModule(model)))
    for value, expected in zip(ours, _steps(eager, under_autocast(eager)), strict=True):
        assert torch.equal(value, expected)


def test_inference_has_eagers_bits() -> None:
    torch.manual_seed(0)
    model = Net()
    model.eval()
    eager = copy.deepcopy(model)
    compiled = CompiledModule(model)
    x = torch.randn(4, 8)
    with torch.no_grad():
        for ours, theirs in zip(compiled(x), eager(x), strict=True):
            assert torch.equal(ours, theirs)
            assert not ours.requires_grad
    assert torch.equal(model.mean, eager.mean)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        buckets = torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]))
        return self.linear(x) * F.one_hot(buckets, 4).sum(-1)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            angle = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * torch.ones(4)
            cosine = angle.cos()
        return self.linear(x) * cosine


class Routed(torch.autograd.Function):
    """Its backward scatters into a value that it has made, and scales the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, gates: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(gates, index)
        picked = torch.zeros_like(gates)
        picked.scatter_(-1, index, 1.0)
        return (gates * picked).sum(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gates, index = ctx.saved_tensors
        (gradient,) = gradients
        gradient = gradient * 2.0
        gradient.mul_(3.0)
        scores = gates * -gradient
        scores[:, 1:].add_(1.0)
        scores.scatter_add_(-1, index, gradient)
        return scores, None, None


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        gates = torch.softmax(scores, -1)
        index = gates.detach().argmax(-1, keepdim=True)
        routed: Tensor = Routed.apply(scores, gates, index)  # type: ignore[no-untyped-call]
        return routed * x


class Mapped(nn.Module):
    """Nested vmaps, of the model's weights too, and one whose result nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        def inner(row: Tensor, number: Tensor) -> Tensor:
            return row * number.sin() + self.weight[0].sum()

        nested = torch.vmap(torch.vmap(inner, in_dims=(None, 0)), in_dims=(0, 0))
        mask, unread = (torch.vmap(lambda row: row > 0)(v) for v in (x, x + 1))
        assert unread.shape == mask.shape
        return nested(self.weight, x * 2) * mask[..., None]


class WritesOut(nn.Module):
    """Writes to `out=`: values of the graph, one of them of another dtype, and a buffer."""

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("sums", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y, wide = x.clone(), torch.zeros(3, 4, dtype=torch.float64)
        torch.add(x, 1, out=y)
        torch.add(x, 1, out=wide)
        torch.mul(self.sums, 0.5, out=self.sums)
        torch.add(self.sums, x, out=self.sums)
        return y * self.weight + wide * 2


class History(nn.Module):
    """Buffers that are copied from each other, of which some are written before they are read for the copy."""

    now: Tensor
    before: Tensor
    turned: Tensor
    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        for name in ("now", "before", "turned"):
            self.register_buffer(name, torch.randn(4, 4))
        self.register_buffer("row", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        drift = (self.now - self.before).sum() + self.row.sum()
        self.before.copy_(self.now)
        self.turned.copy_(self.now.t()[:, :1])
        self.now.copy_(x[0])
        self.row.copy_(self.now.mean())
        return x * self.weight * drift


class Numbered(nn.Module):
    """Writes a number, and the results of operators, to buffers that nothing reads after that."""

    number: Tensor
    following: Tensor
    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        for name in ("number", "following"):
            self.register_buffer(name, torch.zeros(3, 4))
        self.register_buffer("wide", torch.zeros(3, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.number.copy_(1.5)  # type: ignore[arg-type]  # torch takes numbers
        self.following.copy_(x + 1)
        self.wide.copy_(x * 2)
        return x * self.weight


@pytest.mark.parametrize("make", [Masked, Rotary, Router, Mapped, WritesOut, History, Numbered])
def test_forwards_of_many_kinds_have_eagers_bits(make: Make) -> None:
    twins = Twins(make())
    for _ in range(3):
        twins.assert_equal(torch.randn(3, 4), loss=weighted_sum, rtol=0.0, atol=0.0)
    with torch.no_grad():
        twins.assert_equal(torch.randn(3, 4), rtol=0.0, atol=0.0)


def test_what_is_computed_without_gradients_gets_no_backward() -> None:
    compiled = CompiledModule(Rotary())
    compiled(torch.randn(3, 4)).sum().backward()
    (capture,) = compiled.captures
    traces = (capture.forward_traces[-1], capture.backward_traces[-1])
    forward, backward = ({b.sym.name for b in t.bound_symbols} for t in traces)
    assert "aten_cos" in forward
    assert not {"aten_cos", "aten_sin"} & backward


def _parts(y: Tensor) -> Tensor:
    both = y.new_empty(3, 6)
    both[:, :4].copy_(y)
    both[:, 4:].copy_(y[:, :2] * 2)
    return both


def _of_a_value(y: Tensor) -> Tensor:
    doubled = y * 2
    doubled[:, :2].mul_(3.0)
    before = doubled.t()
    doubled[1:].add_(y[1:])
    return doubled * before.t()


def _in_two(y: Tensor) -> Tensor:
    a, b = torch.zeros(3, 4), torch.ones(3, 4)
    a[0].add_(y[0])
    b[:, 1].copy_(a[:, 1])
    a[1:] = b[1:] * y[1:]
    return a + b


def _around_a_layer(y: Tensor) -> Tensor:
    doubled = y * 2.0
    rows = doubled[:2]
    doubled.mul_(3.0)
    z = F.linear(doubled, torch.ones(4, 4))
    rows.add_(1.0)
    return doubled + z


class Applies(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize("function", [_parts, _of_a_value, _in_two, _around_a_layer])
def test_a_change_through_one_view_reaches_all(function: Callable[[Tensor], Tensor]) -> None:
    twins = Twins(Applies(function))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum, rtol=0.0, atol=0.0)
    with torch.no_grad():
        twins.assert_equal(torch.randn(3, 4), rtol=0.0, atol=0.0)


class BetweenLayers(nn.Module):
    """Changes what the derivative of a layer reads, which eager refuses in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2.0
        rows = y[:2]
        y.mul_(3.0)
        z = self.linear(y)
        rows.add_(1.0)
        return y + z


def test_a_change_of_what_a_derivative_reads_is_refused_with_file_and_line() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        BetweenLayers()(x).sum().backward()
    with pytest.raises(CompileError, match=r"test_lowering\.py:\d+"):
        CompiledModule(BetweenLayers())(x)


def test_a_spectral_norm_trains_as_in_eager() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 6))
    twins = Twins(layer.train())
    for _ in range(3):
        twins.assert_equal(torch.randn(4, 8), loss=weighted_sum, rtol=0.0, atol=0.0)
    twins.change(lambda m: m.eval())
    twins.assert_equal(torch.randn(4, 8), loss=weighted_sum, rtol=0.0, atol=0.0)


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.table = torch.arange(3.0)  # a plain attribute, neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * self.table + torch.tensor([1.0, 2.0, 3.0])


def test_tensor_literals_and_plain_tensor_attributes() -> None:
    twins = Twins(Constants())
    twins.assert_equal(torch.randn(3), loss=weighted_sum, rtol=0.0, atol=0.0)
    twins.change(lambda m: setattr(m, "table", torch.full((3,), 5.0)))
    twins.assert_equal(torch.randn(3), loss=weighted_sum, rtol=0.0, atol=0.0)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.linear(x), (0, 1), value=1.0)


def test_an_attribute_that_deterministic_code_reads_is_a_constant() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        Twins(Padded()).assert_equal(torch.randn(3, 4), loss=weighted_sum, rtol=0.0, atol=0.0)
    finally:
        torch.use_deterministic_algorithms(mode=False)


class Gradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self) -> Tensor:
        return torch.func.grad(lambda w: w.sin().sum())(self.weight)


def test_gradients_within_forward_have_eagers_bits() -> None:
    Twins(Gradients()).assert_equal(loss=weighted_sum, rtol=0.0, atol=0.0)


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
        self.compiled = CompiledModule(self.model, planner=self.planner)
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
    assert all("test_lowering.py:" in p.source for p in places if p)


class ReadsANumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        return kept[kept > 0].sum()


def test_a_refusal_names_the_users_line() -> None:
    with pytest.raises(CompileError, match=r"test_lowering\.py:\d+ .*cannot be compiled"):
        CompiledModule(ReadsANumber())(torch.randn(2, 4))


class Jacobian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        values = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.layer(row))))(x)
        return self.layer(x).sum() + values.square().sum()


def test_derivatives_inside_of_vmap_are_those_of_eager() -> None:
    eager = Jacobian()
    compiled = CompiledModule(copy.deepcopy(eager))
    x = torch.randn(4, 3)
    for module in (eager, compiled):
        module(x).backward()
    for mine, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
