"""Views of views are made at once, with the same bits and bytes; what the caller gets is what it got before."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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
