"""Outputs beside a loss: no zeros stand for the gradients that nobody gives, and those that somebody does count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from harness.memory import measured_peak_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.planner.devices import device

WIDTH = 32
X = torch.randn(24, 5, WIDTH, generator=torch.Generator().manual_seed(1))
X_BYTES = X.numel() * X.element_size()


class Outputs(NamedTuple):
    loss: Tensor
    hidden: Tensor
    keys: Tensor


class Model(nn.Module):
    """Returns its loss, what it is computed from, and what a view of is read before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Outputs:
        keys = self.first(x).transpose(0, 1)
        hidden = self.second(torch.tanh(keys)).sigmoid()
        return Outputs(hidden.square().mean(), hidden, keys)


class Compiled:
    def __init__(self, model: nn.Module, leave_out: Sequence[str] = ()) -> None:
        self.planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=None)
        config = CompileConfig(leave_out=tuple(leave_out))
        self.module = CompiledModule(model, planner=self.planner, config=config)

    @property
    def symbols(self) -> list[str]:
        return [step.op.symbol for step in self.planner.calls[-1].program.steps]

    def run(self) -> None:
        outputs = self.module(X)  # the caller is taken to hold all of them
        outputs.loss.backward()

    def predicted_bytes(self) -> int:
        call = self.planner.calls[-1]
        held = sum(call.program.storages[s].nbytes for s in call.program.held)
        return call.profile.peak_bytes - held - call.memory.other_bytes


def gradients_of(
    model: nn.Module, module: nn.Module, loss: Callable[[Outputs], Tensor]
) -> list[Tensor]:
    model.zero_grad()
    loss(module(X)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


LOSSES: dict[str, Callable[[Outputs], Tensor]] = {
    "the loss alone": lambda o: o.loss,
    "and what it is computed from": lambda o: o.loss + o.hidden.square().sum(),
    "and a gradient with strides of zero": lambda o: o.loss + o.keys.sum(),
    "all three": lambda o: o.loss * 2 + (o.hidden * o.keys).mean(),
    "not the loss": lambda o: (o.hidden * X.transpose(0, 1)).sum(),
    "a view": lambda o: o.loss + o.keys.transpose(0, 2)[:3].exp().sum(),
}


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module, Compiled]:
    torch.manual_seed(0)
    model = Model()
    eager = deepcopy(model)
    return eager, model, Compiled(model)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_eagers_whatever_is_differentiated(
    pair: tuple[nn.Module, nn.Module, Compiled], loss: str
) -> None:
    eager, model, compiled = pair
    expected = gradients_of(eager, eager, LOSSES[loss])
    found = gradients_of(model, compiled.module, LOSSES[loss])
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_comes_in_the_second_backward_is_added() -> None:
    model = Model()
    module, eager = Compiled(model).module, deepcopy(model)
    for each, run in ((model, module), (eager, eager)):
        outputs = run(X)
        outputs.loss.backward(retain_graph=True)
        (outputs.hidden.sum() + outputs.loss).backward()
        assert each is model or all(
            torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]
            for p, q in zip(model.parameters(), eager.parameters(), strict=True)
        )


def test_no_zeros_are_made_and_the_step_holds_no_bytes_for_them() -> None:
    model = Model()
    short, long = Compiled(model), Compiled(model, leave_out=["leave_out_zeros"])
    for compiled in (short, long):
        compiled.run()
        model.zero_grad()
        assert measured_peak_bytes(compiled.run) == compiled.predicted_bytes()
        model.zero_grad()
    assert short.symbols.count("add_if_given") == 2
    assert long.symbols.count("add_if_given") == 0
    assert long.predicted_bytes() - short.predicted_bytes() >= 2 * X_BYTES


class Pair(nn.Module):
    """What is returned is the loss's own operand, so that its computed gradient is no memory of its own."""

    def forward(self, x: Tensor) -> Outputs:
        twice = x * 2
        return Outputs(twice.sum(), twice, twice)


def test_where_no_operator_makes_the_other_term_zeros_are_added() -> None:
    x = X.clone().requires_grad_()
    module = CompiledModule(Pair())
    module(x).loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(X, 2.0))
    module(x).hidden.sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 4.0))


def test_without_a_loss_gradients_of_all_outputs_are_expected() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = self.linear(x)
            return torch.tanh(first), first

    compiled = Compiled(Hidden())
    first, _ = compiled.module(X)
    first.sum().backward()
    assert "add_if_given" not in compiled.symbols
