"""Views of views are made at once, with the same bits and bytes; what the caller gets is what it got before."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.memory import measured_peak_bytes
from thunder_memsave.aten.record import storage_id
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.search.solve import Policy

WIDTH, HEADS, NUM_ROWS, LENGTH = 32, 4, 4, 8


class Layer(nn.Module):
    """Linear layers without a bias, of rows of tokens, and heads; its results are a loss and what it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.first(x).view(NUM_ROWS, LENGTH, HEADS, -1).transpose(1, 2)
        whole = torch.sigmoid(heads).transpose(1, 2).reshape(NUM_ROWS, LENGTH, WIDTH)
        found = self.second(whole)
        return torch.log_softmax(found.view(-1, WIDTH), -1).square().mean(), found


@dataclass
class Ran:
    gradients: list[Tensor]
    predicted_bytes: int
    measured_bytes: int
    num: Counter[str]
    """Number of each operator in the joint trace."""


def run(*, leave_out: tuple[str, ...], policy: Policy) -> Ran:
    torch.manual_seed(0)
    model, x = Layer(), torch.randn(NUM_ROWS, LENGTH, WIDTH)
    planner = MemoryPlanner(MemoryConfig(policy=policy), device=device("cpu"), budget_bytes=None)
    compiled = CompiledModule(model, planner=planner, config=CompileConfig(leave_out=leave_out))
    compiled(x)[0].backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    def step() -> None:
        loss, _found = compiled(x)  # held until backward has ended
        loss.backward()

    measured = measured_peak_bytes(step)
    held = sum(t.nbytes for t in (*model.parameters(), x))
    (call,) = planner.calls
    num = Counter(b.sym.name for b in call.joint.bound_symbols)
    return Ran(gradients, call.profile.peak_bytes, measured + held, num)


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
def test_fewer_views_have_the_same_bits_and_bytes(policy: Policy) -> None:
    joined, apart = (run(leave_out=names, policy=policy) for names in ((), ("join_views",)))

    assert len(joined.gradients) == 2
    assert all(map(torch.equal, joined.gradients, apart.gradients))
    assert joined.predicted_bytes == joined.measured_bytes == apart.predicted_bytes
    # Of each layer, forward transposes the weight, and backward the gradient of the result.
    assert (joined.num["aten_t"], apart.num["aten_t"]) == (4, 9)
    assert joined.num["aten_unsafe_view"] == 0
    reshapes = joined.num["aten_view"], apart.num["aten_view"] + apart.num["aten_unsafe_view"]
    assert reshapes[0] < reshapes[1]


class Views(nn.Module):
    """Returns views that are all of what they are views of, of a value and of the input."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2.0
        return (y.t().t(), y.view(2, 3, 4).view(6, 4), x.t().t(), y)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_caller_gets_views_as_from_eager(requires_grad: bool) -> None:
    x = torch.randn(6, 4, requires_grad=requires_grad)

    found, expected = CompiledModule(Views())(x), Views()(x)

    assert len(set(map(id, found))) == 4
    assert all(map(torch.equal, found, expected))
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    assert storage_id(found[2]) == storage_id(x)


class Moved(nn.Module):
    """Its gradients are all the one that it gets."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.t().t() + b.view(4, 6).view(6, 4) + c.transpose(0, 1).transpose(1, 0)


def test_gradients_that_are_one_value_are_right() -> None:
    operands = [torch.randn(6, 4, requires_grad=True) for _ in range(3)]
    given = torch.randn(6, 4)

    CompiledModule(Moved())(*operands).backward(given)

    gradients = [operand.grad for operand in operands]
    assert all(g is not None and torch.equal(g, given) for g in gradients)


class _Kept(torch.autograd.Function):
    """Its gradient is what forward computed, transposed and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sin(x)
        ctx.save_for_backward(y.t())
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        saved: Tensor = ctx.saved_tensors[0]
        return saved.t()


class Kept(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = _Kept.apply(x)  # type: ignore[no-untyped-call]
        return kept


def test_backward_returns_no_value_of_forward_itself() -> None:
    x = torch.randn(6, 4, requires_grad=True)

    CompiledModule(Kept())(x).sum().backward()

    assert x.grad is not None
    assert torch.equal(x.grad, x.detach().sin())


class OneImage(nn.Module):
    """Its batch of one image is one of channels first or last, by the stride of the dim of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.permute(0, 3, 1, 2).reshape(x.shape[0], 16, 8, 8))


class Widened(nn.Module):
    """Its last view asks for a stride of 1, which a dim of one element has after the views before."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:1].t().reshape(5).reshape(5, 1).view(torch.float16).clone()


@pytest.mark.parametrize(("made", "shape"), [(OneImage, (1, 8, 8, 16)), (Widened, (6, 5))])
def test_strides_of_dims_of_one_element_stay(made: type[nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module, x = made(), torch.randn(shape)
    with torch.no_grad():
        found, expected = CompiledModule(module)(x), module(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
