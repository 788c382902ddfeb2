"""Forward copies what it overwrites and backward reads: in-place operations have eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from thunder.dev_utils.check_trace import check_trace
from torch import Tensor, nn
from torch.nn import functional as F

from harness.memory import joint_traces
from harness.parity import Twins
from passes.contract import check, check_identity
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.passes.overwritten import keep_overwritten
from thunder_memsave.passes.symbols import written_in_place
from thunder_memsave.planner.devices import device

WIDTH = 6

IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "silu": lambda x: F.silu(x, inplace=True),
    "silu by position": lambda x: F.silu(x, True),
    "relu": lambda x: F.relu(x, inplace=True),
    "elu": lambda x: F.elu(x, 1.0, True),
    "hardswish": lambda x: F.hardswish(x, True),
    "mish": lambda x: F.mish(x, True),
    "selu": lambda x: F.selu(x, inplace=True),
    "dropout": lambda x: F.dropout(x, 0.0, True, True),
    "a product": lambda x: x.mul_(3.0),
    "a product with its own sum": lambda x: x.mul_(x.sum(dim=-1, keepdim=True)),
    "normalised": lambda x: x.exp().mul(1.0).div_(x.exp().sum(dim=-1, keepdim=True)),
    "twice": lambda x: F.silu(F.mish(x, True), True),
    "of a view": lambda x: F.silu(x.view(-1), True).view(x.shape),
}


class InPlace(nn.Module):
    """Applies each operation to the result of its own linear."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in IN_PLACE)

    def forward(self, x: Tensor) -> Tensor:
        operations = zip(self.linears, IN_PLACE.values(), strict=True)
        return torch.stack([run(linear(x)) for linear, run in operations])


class Counting(nn.Module):
    """Reads a buffer, and then counts in it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(2, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.linear(x) * self.seen.view(-1)
        self.seen.add_(1.0)
        return scaled


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def gradients(module: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    module.zero_grad()
    squares(call(x)).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_operations_in_place_have_the_gradients_of_eager() -> None:
    with joint_traces() as joint:
        Twins(InPlace()).assert_equal(torch.randn(3, WIDTH), loss=squares)
    changed = keep_overwritten(joint[-1])
    assert changed is not joint[-1]
    check_trace(changed)


def test_also_with_the_policy_recompute_all() -> None:
    model, x = InPlace(), torch.randn(3, WIDTH)
    expected = gradients(model, CompiledModule(model), x)
    memory = MemoryConfig(policy="recompute_all")
    planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=None)
    actual = gradients(model, CompiledModule(model, planner=planner), x)
    assert len(actual) == 2 * len(IN_PLACE)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("policy", [None, "plan", "recompute_all"])
def test_a_buffer_that_is_read_and_then_written_to(policy: Any) -> None:
    """Eager refuses the backward; the gradient is that of the values that forward read."""
    model, x = Counting(), torch.randn(3, WIDTH)
    planner = policy and MemoryPlanner(
        MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None
    )
    compiled = CompiledModule(model, planner=planner)
    for step in (1.0, 2.0):
        output = compiled(x)
        weight_grad, _ = gradients_of(output, model)
        assert torch.equal(model.seen, torch.full_like(model.seen, step + 1))
        torch.testing.assert_close(output, model.linear(x) * step)
        torch.testing.assert_close(weight_grad, (2 * output * step).T @ x)


def gradients_of(output: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(squares(output), list(model.parameters()))


def test_nothing_is_copied_where_nothing_is_written_or_backward_reads_nothing_of_it() -> None:
    check(keep_overwritten, name="keep_overwritten", changes_the_probe=False)
    check_identity(keep_overwritten, name="keep_overwritten")

    class Counts(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(1.0)
            return x * 2.0

    counts = CompiledModule(Counts())
    counts(torch.randn(3, WIDTH, requires_grad=True)).sum().backward()
    names = [b.sym.name for b in counts.captures[-1].forward_traces[-1].bound_symbols]
    assert "copy_" in names
    assert "clone" not in names


def test_what_a_convolution_reads_is_not_copied_when_its_result_is_written_to() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.convolution(x), inplace=True)

    twins = Twins(Convolved())
    twins.assert_equal(torch.randn(1, 2, 5, 5), loss=squares)
    names = [b.sym.name for b in twins.compiled.captures[-1].forward_traces[-1].bound_symbols]
    assert "copy_" in names
    assert "clone" not in names


def test_a_write_that_nothing_reads_does_not_reach_backward() -> None:
    """Eager refuses the backward; the gradient is that of the values that forward read."""

    class Wiped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            result = F.gelu(hidden)
            hidden.zero_()
            return result

    model, x = Wiped(), torch.randn(3, WIDTH)
    squares(CompiledModule(model)(x)).backward()
    expected = torch.autograd.grad(squares(F.gelu(model.linear(x))), list(model.parameters()))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, gradients, expected))
    assert len(gradients) == len(expected) == 2


def test_labels_that_are_shifted_into_a_new_tensor_write_to_nothing_that_is_there() -> None:
    class Shifted(nn.Module):
        """Reads tokens, and the tokens before them as T5 finds those."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(WIDTH, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            before = ids.new_zeros(ids.shape)
            before[..., 1:] = ids[..., :-1].clone()
            before[..., 0] = 1
            return torch.sin(self.embedding(ids)) * torch.cos(self.embedding(before))

    model, ids = Shifted(), torch.arange(WIDTH).reshape(2, -1)
    expected = gradients(model, model, ids)
    memory = MemoryConfig(policy="recompute_all")
    planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=None)
    with joint_traces() as joint:
        (actual,) = gradients(model, CompiledModule(model, planner=planner), ids)
    torch.testing.assert_close(actual, expected[0])
    assert "copy_with_setitem_impl" in {b.sym.name for b in joint[-1].bound_symbols}
    assert [b for b in joint[-1].bound_symbols if written_in_place(b) is not None] == []
