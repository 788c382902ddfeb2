"""Weights on the host are as those on the device where forward writes to them, users change them, or code is eager."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.copy_engines import hostile_copies
from harness.fabric import make_fabric
from harness.host_weights import small_host_weights
from harness.memory import measured_memory
from thunder_memsave.compiler.pieces.piecewise_module import PiecewiseModule
from thunder_memsave.errors import BudgetError, CaptureError, CompileError, HostMemoryError
from thunder_memsave.ops.host_copies.weights import place_of

WIDTH = 32
ON_HOST = {"offload_weights": ("*",), "host_budget": 2**28}
Change = Callable[[Any], object]


@pytest.fixture(autouse=True)
def small_weights() -> Iterator[None]:
    """Let small weights stay on the host too."""
    with small_host_weights():
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() + x


class Net(nn.Module):
    """Frozen layers and a frozen weight of its own, behind a trained one; `how` says what forward does besides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.embedding = nn.Embedding(40, WIDTH, max_norm=0.5)
        self.requires_grad_(False)
        self.first.requires_grad_(True)
        self.elsewhere = [self.own]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        own = self.own
        if self.how == "branch" and float(x.sum()) > 1e9:
            return x
        if self.how == "out":
            with torch.no_grad():
                torch.mul(own, 0.9, out=own)
        if self.how == "foreach":
            with torch.no_grad():
                torch._foreach_mul_([own], 0.9)
        if self.how == "data":
            F.hardtanh_(own.data, -0.1, 0.1)
        x = self.first(x)
        if self.how == "max_norm":
            x = x + self.embedding(torch.arange(len(x)))
        for layer in self.layers:
            x = layer(x)
        return x @ (self.elsewhere[0] + own if self.how == "list" else own)


class Run:
    """Steps of a net."""

    def __init__(self, how: str, memory: dict[str, Any], **options: Any) -> None:
        self.fabric = make_fabric(memory=memory, sharding="none", **options)
        self.net = Net(how)
        self.model: Any = self.fabric.setup_module(self.net)
        self.x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))

    def step(self, model: Any = None) -> list[Tensor]:
        """Return the gradients of a step, and the weights after it."""
        model = self.model if model is None else model
        model.zero_grad()
        self.fabric.backward(model(self.x).square().sum())
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [*found, *(p.detach().clone() for p in model.parameters())]

    @property
    def on_host(self) -> list[str]:
        return [name for name, p in self.net.named_parameters() if place_of(p) is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@contextmanager
def pieces() -> Iterator[None]:
    """Let modules be compiled in pieces on a CPU too."""
    with patch.object(PiecewiseModule, "_gains_by_pieces", return_value=True):
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["out", "foreach", "data", "max_norm", "branch", "list"])
def test_what_forward_writes_and_eager_code_reads_is_as_on_the_device(how: str) -> None:
    with pieces(), hostile_copies():
        here, there = Run(how, {}), Run(how, ON_HOST)
        for _ in range(2):
            assert same(there.step(), here.step())
        assert {"own", "layers.0.linear.weight"} <= set(there.on_host)
        with torch.inference_mode():
            assert torch.equal(there.model(there.x), here.model(here.x))


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("out", CompileError, "in place, which memory.offload_weights keeps on the host"),
        ("list", CaptureError, "a weight that memory.offload_weights keeps on the host, of shape"),
    ],
)
def test_a_whole_graph_refuses_it(how: str, kind: type[Exception], message: str) -> None:
    run = Run(how, ON_HOST, fullgraph=True)
    with pytest.raises(kind, match=message):
        run.step()


def smallest_budget(memory: dict[str, Any]) -> tuple[int, list[Tensor]]:
    """Return the smallest budget of which three steps in pieces know, and what the last gives."""
    budget = 1000
    for _ in range(9):
        try:
            run = Run("branch", {**memory, "budget": budget})
            return budget, [run.step() for _ in range(3)][-1]
        except BudgetError as error:
            budget = error.smallest_bytes or 0
    raise AssertionError("the errors' budgets are refused again and again")


@pytest.mark.filterwarnings("ignore")
def test_a_step_in_pieces_counts_no_weight_on_the_host() -> None:
    with pieces():
        here, expected = smallest_budget({})
        there, found = smallest_budget(ON_HOST)
    assert same(found, expected)
    assert here - there >= 4 * WIDTH * WIDTH  # of two layers, one is there at a time


CHANGES: dict[str, Change] = {
    "other numbers": lambda net: net.own.data.mul_(0.5),
    "transposed": lambda net: setattr(net.own, "data", net.own.data.t()),
    "replaced": lambda net: setattr(net, "own", nn.Parameter(net.own.detach() * 2, False)),
    "trained": lambda net: net.own.requires_grad_(True),
    "frozen": lambda net: net.first.requires_grad_(False) and net.own.requires_grad_(True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_users_change_between_steps_is_as_on_the_device(change: Change) -> None:
    with hostile_copies():
        here, there = Run("", {}), Run("", ON_HOST)
        for run in (here, there):
            run.step()
            change(run.net)
        assert same(there.step(), here.step())
    assert all(not p.requires_grad for n, p in there.net.named_parameters() if n in there.on_host)


def test_a_replaced_weight_is_planned_for() -> None:
    run = Run("", ON_HOST)
    run.step()
    run.net.own = nn.Parameter(run.net.own.detach().clone(), requires_grad=False)
    run.step()
    assert "own" not in run.on_host
    plan = run.fabric.strategy.plan  # type: ignore[attr-defined]
    held = [p for p in run.net.parameters() if place_of(p) is None]
    run.model.zero_grad()
    measured = measured_memory(lambda: run.fabric.backward(run.model(run.x).square().sum()))
    live = sum(t.nbytes for t in (*held, run.x))
    assert plan.predicted_peak_bytes >= live + measured.peak_bytes - 512


def test_a_copy_of_the_model_has_its_weights_on_the_host() -> None:
    with hostile_copies() as (engine, _):
        run = Run("", ON_HOST)
        expected = run.step()
        copied = copy.deepcopy(run.model)
        begun = engine.num_begun["in"]
        assert same(run.step(copied), expected)
        assert engine.num_begun["in"] > begun


def test_a_set_up_that_failed_leaves_no_mark() -> None:
    net = Net("")
    with pytest.raises(HostMemoryError):
        make_fabric(memory={**ON_HOST, "host_budget": 1000}, sharding="none").setup_module(net)
    assert not any(place_of(p) for p in net.parameters())
