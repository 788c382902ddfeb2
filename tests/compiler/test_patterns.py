"""Patterns that real models contain give what eager gives, or are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.parity import Twins, weighted_sum
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import CaptureError, CompileError
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.search.solve import Policy


class NestedAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.low(x)
        with torch.autocast("cpu", enabled=False):
            z = self.high(y.float())
        return F.softmax(z, -1) + self.low(z)


def test_autocast_disabled_inside_autocast() -> None:
    twins = Twins(NestedAutocast())
    x = torch.randn(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        twins.assert_equal(x, loss=weighted_sum, rtol=2e-2, atol=2e-2)
    traces = str(twins.compiled.captures[0].forward_traces[-1])
    assert traces.count("cpu f32[8, 8]") > 0


class AutocastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
            return F.softmax(torch.matmul(y, y.transpose(0, 1)), -1).to(y.dtype) + y.exp()


def test_autocast_opened_inside_the_model() -> None:
    twins = Twins(AutocastInside())
    output = twins.assert_equal(torch.randn(8, 8), loss=weighted_sum, rtol=2e-2, atol=5e-2)
    assert output.dtype is torch.bfloat16


class Checkpointed(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.p = p

    def region(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(x)), self.p)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, x, use_reentrant=False)


def test_checkpoint_inside_the_model() -> None:
    Twins(Checkpointed(0.0)).assert_equal(torch.randn(3, 8), loss=weighted_sum)


def test_dropout_inside_checkpoint_is_drawn_once() -> None:
    """The mask seen by backward is the mask of the forward: where the output is zero, the gradient is."""
    model = Checkpointed(0.5)
    x = torch.randn(64, 8, requires_grad=True)
    with torch.no_grad():
        model.linear.weight.copy_(torch.eye(8))
    output = CompiledModule(model)(x)
    output.sum().backward()
    assert x.grad is not None
    kept = output != 0
    assert torch.equal(x.grad != 0, kept)
    assert 0 < kept.sum() < kept.numel()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (
            grad * x * 7,
            None,
        )  # not the derivative of the forward, to see that it is the one that runs


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.linear(x), 0.5)  # type: ignore[no-untyped-call]


class Found(torch.autograd.Function):
    """Its forward computes the gradient, as some losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        gradient = torch.cos(x)
        ctx.save_for_backward(gradient, weight)
        return torch.sin(x).sum() + 2 * weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gradient, weight = ctx.saved_tensors
        return gradient, weight


class FoundInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Found.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return found


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
def test_a_gradient_may_be_a_value_of_forward_or_an_operand(policy: Policy) -> None:
    module, x = FoundInForward(), torch.randn(4, 8, requires_grad=True)
    planner = MemoryPlanner(MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None)
    CompiledModule(module, planner=planner)(x).backward()
    assert module.weight.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().cos())
    assert torch.equal(module.weight.grad, module.weight.detach())


def test_a_custom_autograd_function_runs_its_own_backward() -> None:
    Twins(CustomFunction()).assert_equal(torch.randn(3, 8), loss=weighted_sum)


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_fully_masked_rows_are_finite_where_eager_is(mask_dtype: torch.dtype) -> None:
    allowed = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    allowed[0, :, :, :3] = False  # left padding: the first rows of sample 0 see nothing
    mask = allowed if mask_dtype is torch.bool else torch.where(allowed, 0.0, -torch.inf)
    output = Twins(Attention()).assert_equal(torch.randn(2, 6, 8), mask, loss=weighted_sum)
    assert output.isfinite().all()


def test_fully_masked_rows_are_finite_with_attention_dropout() -> None:
    allowed = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    allowed[0, :, :, :3] = False
    model = Attention(dropout=0.25)
    output = CompiledModule(model)(torch.randn(2, 6, 8), allowed)
    weighted_sum(output).backward()
    assert output.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


class Grouped(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


def test_grouped_query_attention_repeats_heads_as_eager_does() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    Twins(Grouped()).assert_equal(q, k, v)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.left(y), self.right(y)


def test_a_parameter_without_gradient_has_none_as_in_eager() -> None:
    twins = Twins(TwoHeads())
    twins.assert_equal(torch.randn(3, 4), loss=lambda o: weighted_sum(o[0]))
    assert twins.model.get_parameter("right.weight").grad is None
    assert twins.model.get_parameter("unused.weight").grad is None


def test_two_losses_from_one_forward_with_separate_backwards() -> None:
    twins = Twins(TwoHeads())
    x = torch.randn(3, 4)
    for forward in (twins.compiled, twins.eager):
        left, right = forward(x)
        weighted_sum(left).backward(retain_graph=True)
        weighted_sum(right).backward()
    twins.assert_gradients_equal()


def test_a_second_backward_without_retain_graph_is_refused_by_name() -> None:
    left, right = CompiledModule(TwoHeads())(torch.randn(3, 4))
    left.sum().backward()
    with pytest.raises(RuntimeError, match="pass retain_graph=True to every backward but the last"):
        right.sum().backward()


def test_backward_twice_with_retain_graph_is_bit_equal() -> None:
    model = TwoHeads()
    left, _ = CompiledModule(model)(torch.randn(3, 4))
    gradients = []
    for retain in (True, True, False):
        model.zero_grad()
        weighted_sum(left).backward(retain_graph=retain)
        gradients.append(model.trunk.weight.grad)
    assert gradients[0] is not None
    assert all(g is not None and torch.equal(g, gradients[0]) for g in gradients)


def test_create_graph_is_refused_by_name() -> None:
    left, _ = CompiledModule(TwoHeads())(torch.randn(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="create_graph=True, which thunder_memsave does not"):
        left.sum().backward(create_graph=True)


def test_batch_norm_updates_its_buffers_as_eager_does() -> None:
    twins = Twins(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(3):
        twins.assert_equal(torch.randn(6, 4), loss=weighted_sum, rtol=1e-4, atol=1e-4)
    assert twins.model.get_buffer("1.num_batches_tracked").item() == 3
    twins.change(lambda m: m.eval())
    twins.assert_equal(torch.randn(6, 4), loss=weighted_sum, rtol=1e-4, atol=1e-4)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_tied_weights_get_one_gradient() -> None:
    Twins(Tied()).assert_equal(torch.randint(0, 7, (2, 5)), loss=weighted_sum)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.add_(1.0)
        y[0] = 0.0
        y *= 2
        return y


def test_in_place_operations() -> None:
    Twins(InPlace()).assert_equal(torch.randn(3, 4), loss=weighted_sum)


class InPlaceThroughAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1.0
        y[:, :2].mul_(3.0)
        return y


def test_an_in_place_operation_through_a_view() -> None:
    twins = Twins(InPlaceThroughAView())
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


class ReturnsItsInput(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"x": x, "sum": x + y, "again": x, "constant": 3, "none": None}


def test_an_input_that_is_returned_is_the_same_object() -> None:
    twins = Twins(ReturnsItsInput())
    x = torch.randn(3)
    output = twins.assert_equal(x, torch.randn(3))
    assert output["x"] is x
    assert output["again"] is x


@dataclass
class Output:
    loss: Tensor
    hidden: tuple[Tensor, ...]
    name: str


class ReturnsADataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, *, batch: dict[str, list[Tensor]], power: int = 2) -> Output:
        a, b = batch["tensors"]
        hidden = self.linear(a) ** power
        return Output(loss=(hidden - b).mean(), hidden=(hidden, hidden + 1), name="output")


def test_nested_keyword_inputs_and_dataclass_outputs() -> None:
    model = ReturnsADataclass()
    compiled = CompiledModule(model)
    batch = {"tensors": [torch.randn(3, 4), torch.randn(3, 4)]}
    for power in (2, 3):
        ours, theirs = compiled(batch=batch, power=power), model(batch=batch, power=power)
        assert isinstance(ours, Output)
        assert ours.name == "output"
        torch.testing.assert_close(ours.loss, theirs.loss)
        torch.testing.assert_close(ours.hidden, theirs.hidden)


def test_dropout_is_redrawn_every_step_and_reproducible() -> None:
    model = nn.Dropout(0.5)
    compiled, x = CompiledModule(model), torch.ones(64)
    torch.manual_seed(0)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(0)
    again = compiled(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert set(first.tolist()) == {0.0, 2.0}


def test_capturing_draws_no_random_numbers() -> None:
    model = nn.Linear(4, 4)
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    CompiledModule(model)(torch.ones(2, 4))
    assert torch.equal(torch.rand(4), expected)


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


def test_data_dependent_control_flow_is_refused_with_file_and_line() -> None:
    with pytest.raises(
        CaptureError,
        match=r"DataDependent.forward cannot be captured .*test_patterns.py:\d+ in forward",
    ):
        CompiledModule(DataDependent())(torch.randn(3))


class GraphBreak(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2


def test_a_graph_break_is_refused_with_file_and_line() -> None:
    with pytest.raises(CaptureError, match=r"test_patterns.py:\d+ in forward.*Move that code out"):
        CompiledModule(GraphBreak())(torch.randn(3))


class NothingToCompile(nn.Module):
    def forward(self, x: int) -> int:
        return x + 1


def test_a_method_without_tensors_is_refused() -> None:
    with pytest.raises(CaptureError, match="runs no tensor operation"):
        CompiledModule(NothingToCompile())(3)


def test_wrong_arguments_raise_what_calling_the_module_raises() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        CompiledModule(NothingToCompile())()


def test_an_error_in_the_model_names_the_line() -> None:
    with pytest.raises(CaptureError, match=r"Linear.forward cannot be captured .*size=\(3, 5\)"):
        CompiledModule(nn.Linear(4, 4))(torch.randn(3, 5))


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self(x).pow(2).mean()


def test_every_method_has_captures_of_its_own() -> None:
    model, x = Methods(), torch.randn(3, 4)
    compiled = CompiledModule(model)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled.call_method("training_step", x), model.training_step(x))
    assert sorted(c.method for c in compiled.captures) == ["forward", "training_step"]


def test_a_meta_device_model_is_captured_and_traced() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.randn(3, 4)
    output = CompiledModule(model)(x)
    assert output.device.type == "meta"
    assert output.shape == (3, 4)


class TwoCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def region(self, x: Tensor) -> tuple[Tensor, Tensor]:
        inner = checkpoint(self.right, x + torch.tensor([1.0, 2.0, 3.0, 4.0]), use_reentrant=False)
        return self.left(x), inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(self.region, x, use_reentrant=False)


def test_a_parameter_of_a_checkpointed_region_without_gradient_has_none() -> None:
    twins = Twins(TwoCheckpointed())
    twins.assert_equal(torch.randn(3, 4), loss=lambda o: weighted_sum(o[0]))
    assert twins.model.get_parameter("right.weight").grad is None


class CheckpointedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)


def test_a_checkpointed_region_that_changes_a_buffer_is_refused() -> None:
    """Eager updates the running statistics twice, once more when it recomputes."""
    with pytest.raises(CompileError, match=r"A checkpointed region changes a tensor from outside"):
        CompiledModule(CheckpointedNorm())(torch.randn(3, 4, requires_grad=True))


class RareInPlace(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept = x.clone()
        kept.clamp_(0, 1).fill_diagonal_(9.0)
        self.table.index_fill_(0, torch.tensor([1]), 3.0)
        return self.linear(kept) * self.table + kept


def test_rare_in_place_operations_keep_their_effect() -> None:
    Twins(RareInPlace()).assert_equal(torch.randn(3, 4), loss=weighted_sum)


class MovingAverage(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean.mul_(0.9).add_(y.mean(0).detach())
        return y - self.mean


def test_a_chain_of_in_place_operations_on_a_buffer() -> None:
    twins = Twins(MovingAverage())
    for _ in range(3):
        twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


class FilledWithResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(3, 4)
        out[:, :2] = self.linear(x)[:, :2]
        return out


def test_a_new_tensor_filled_with_results_gets_their_gradient() -> None:
    Twins(FilledWithResults()).assert_equal(torch.randn(3, 4), loss=weighted_sum)


def test_running_statistics_of_instance_norm_are_refused() -> None:
    with pytest.raises(CompileError, match="instance_norm updates running statistics"):
        CompiledModule(nn.InstanceNorm1d(4, track_running_stats=True))(torch.randn(3, 4, 5))


class SameValueTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return y, y.float(), y.contiguous(), y.detach(), y.view(-1), x.detach(), y


def test_outputs_that_are_one_value_each_have_their_gradient() -> None:
    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        terms = [weighted_sum(o) * (i + 1) for i, o in enumerate(outputs)]
        return torch.stack(terms).sum()

    Twins(SameValueTwice()).assert_equal(torch.randn(3, 4), loss=loss)


class GradInsideNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return self.linear(x)


def test_gradients_turned_on_inside_no_grad_are_refused() -> None:
    with torch.no_grad(), pytest.raises(CompileError, match="turns gradients on itself"):
        CompiledModule(GradInsideNoGrad())(torch.randn(3, 4))


def test_a_forward_that_is_no_function_is_refused() -> None:
    module = nn.Identity()
    module.forward = partial(torch.add, 1)  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="must be a function or a method"):
        CompiledModule(module)(torch.randn(3))
