"""Operations in place have eager's gradients; a pass copies what forward overwrites and backward reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from passes.contract import check, check_identity
from thunder.core import prims
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.dev_utils.check_trace import check_trace
from thunder.executors import torchex
from torch import Tensor, nn
from torch.nn import functional as F

from harness.memory import joint_traces
from harness.parity import Twins
from harness.recompute import joint_trace, run_joint
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import CompileError
from thunder_memsave.passes.in_place.overwritten import keep_overwritten
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
    "of a sum": lambda x: F.relu(x + 1.0, inplace=True),
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
    """Reads a buffer, as `read` says, and then counts in it."""

    seen: Tensor

    def __init__(self, read: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.read = nn.Linear(WIDTH, WIDTH), read
        self.register_buffer("seen", torch.ones(2, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.linear(x) * self.read(self.seen).view(-1)
        self.seen.add_(1.0)
        return scaled


class Scaled(Counting):
    """Only reads the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.seen.view(-1)


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


def gradients(module: nn.Module, call: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    module.zero_grad()
    squares(call(x)).backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def test_operations_in_place_have_the_gradients_of_eager() -> None:
    with joint_traces() as joint:
        Twins(InPlace()).assert_equal(torch.randn(3, WIDTH), loss=squares, rtol=0.0, atol=0.0)
    assert [b for b in joint[-1].bound_symbols if written_in_place(b) is not None] == []


def test_also_with_the_policy_recompute_all() -> None:
    model, x = InPlace(), torch.randn(3, WIDTH)
    expected = gradients(model, CompiledModule(model), x)
    memory = MemoryConfig(policy="recompute_all")
    planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=None)
    actual = gradients(model, CompiledModule(model, planner=planner), x)
    assert len(actual) == 2 * len(IN_PLACE)
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("policy", [None, "plan", "recompute_all"])
def test_a_buffer_of_which_a_copy_is_read_and_that_is_then_written_to(policy: Any) -> None:
    model, x = Counting(), torch.randn(3, WIDTH)
    planner = policy and MemoryPlanner(
        MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None
    )
    twins = Twins(model, planner=planner)
    for step in (1.0, 2.0):
        output = twins.assert_equal(x, loss=squares, rtol=0.0, atol=0.0)
        assert torch.equal(model.seen, torch.full_like(model.seen, step + 1))
        torch.testing.assert_close(output, model.linear(x) * step)


def test_a_buffer_that_is_read_for_a_gradient_and_then_written_to_is_refused_with_the_line() -> (
    None
):
    model, x = Counting(read=lambda seen: seen), torch.randn(3, WIDTH)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares(model(x)).backward()
    with pytest.raises(
        CompileError,
        match=r"changed in place at \S*test_overwritten.py:\d+ .*error too, in backward",
    ):
        CompiledModule(model)(x)


def written_at_the_end_of_forward(trace: TraceCtx) -> TraceCtx:
    """Let forward write zeros to the buffer that backward reads."""
    new = from_trace(trace)
    new.names = set(trace.names)
    symbols = list(trace.bound_symbols)
    backward = next(i for i, b in enumerate(symbols) if b.sym is prims.get_grad)
    buffer = next(a for a in trace.args if a.name == "t_seen")
    with tracectx(new):
        zeros, written = (buffer.replace_name(n) for n in ("zeros", "written"))
        make = torchex.zeros_like.bind(buffer, output=zeros)
        write = torchex.copy_.bind(zeros, buffer, grad_enabled=False, output=written)
    new.bound_symbols = [*symbols[:backward], make, write, *symbols[backward:]]
    return new


def test_what_backward_reads_is_copied_before_forward_overwrites_it() -> None:
    trace = joint_trace(Scaled(), torch.randn(3, WIDTH))
    inputs = [torch.rand(a.shape) for a in trace.args]
    overwriting = written_at_the_end_of_forward(trace)
    changed = keep_overwritten(overwriting)
    check_trace(changed)
    assert "Joint pass keep_overwritten" in str(changed.get_provenance())
    assert [b.sym.name for b in changed.bound_symbols].count("clone") == 1
    reference, ours = run_joint(trace, inputs), run_joint(changed, inputs)
    assert all(map(torch.equal, ours.outputs, reference.outputs))
    weight_grad, reference_grad = ours.gradients[0], reference.gradients[0]
    assert weight_grad is not None
    assert reference_grad is not None
    assert weight_grad.count_nonzero() == weight_grad.numel()
    assert torch.equal(weight_grad, reference_grad)
    assert ours.inputs[[a.name for a in trace.args].index("t_seen")].count_nonzero() == 0


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
    assert "add_in_place" in names
    assert "clone" not in names


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
    assert torch.equal(actual, expected[0])
    assert [b for b in joint[-1].bound_symbols if "slice_scatter" in b.sym.name]
    assert [b for b in joint[-1].bound_symbols if written_in_place(b) is not None] == []
