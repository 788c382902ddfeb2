"""`memory.optimizer_in_backward: auto`: backward updates weights where no plan fits otherwise, with the same bits."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from harness.elsewhere import as_elsewhere
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.fabric_run import FabricRun
from harness.memory import measured_memory
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.errors import BudgetError
from thunder_memsave.fabric.updates import update_in_backward
from thunder_memsave.optim.in_backward import UpdatesInBackward
from thunder_memsave.optim.on_host import StatesOnHost
from thunder_memsave.settings.problems import ConfigError

NO_LIMIT = 2**40
HOST_BYTES = 10_000_000


class Net(nn.Sequential):
    """Its result is a loss."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(120, 120) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]
        return found.square().mean()


class Run(FabricRun):
    """A net whose gradients are most of a step's peak, with its steps."""

    def __init__(
        self,
        budget_bytes: int | None = NO_LIMIT,
        in_backward: str | bool = "auto",
        make: Callable[..., Optimizer] = AdamW,
        offload: str = "none",
        **arguments: Any,
    ) -> None:
        memory: dict[str, Any] = {"optimizer_in_backward": in_backward, "offload": offload}
        if budget_bytes is not None:
            memory["budget"] = budget_bytes
        if offload != "none":
            memory["host_budget"] = HOST_BYTES
        self.fabric = make_fabric(**{"sharding": "none", **arguments}, memory=memory)
        torch.manual_seed(0)
        self.net = Net()
        self.made = make(self.net.parameters())
        self.model, self.optimizer = self.fabric.setup(self.net, self.made)
        self.inputs = torch.randn(2, 120) + self.fabric.global_rank

    def step(self, *, max_norm: float | None = None) -> None:
        self.fabric.backward(self.model(self.inputs))
        if max_norm is not None:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def smallest(**arguments: Any) -> int:
    """Return the smallest budget."""
    with pytest.raises(
        (BudgetError, OtherRankError)
    ) as raised:  # another than the first says it in words
        Run(1000, **arguments).step()
    (found,) = re.findall(r"one was found is ([\d,]+) bytes", str(raised.value))
    return int(found.replace(",", ""))


def between(**arguments: Any) -> int:
    """Return a budget for which updates in backward are needed."""
    at_once, one_by_one = (smallest(in_backward=b, **arguments) for b in (False, True))
    assert one_by_one < at_once - 4
    return (at_once + one_by_one) // 2


def test_backward_updates_where_nothing_else_fits(caplog: pytest.LogCaptureFixture) -> None:
    budget_bytes = between()
    with pytest.raises(BudgetError):
        Run(budget_bytes, in_backward=False).step()
    caplog.set_level(logging.INFO)
    found = Run(budget_bytes).steps(3)
    assert found.strategy.updates_in_backward
    assert found.peak_bytes <= budget_bytes
    assert found.same_as(Run(in_backward=False).steps(3))
    assert "backward updates each weight (memory.optimizer_in_backward: auto)" in caplog.text


def test_the_peak_is_the_planned_one_to_the_byte() -> None:
    run = Run(between()).steps(1)
    held = sum(t.nbytes for t in (*run.net.parameters(), run.inputs))
    states = run.strategy._planned_call().memory.optimizer_bytes
    assert run.peak_bytes == held + states + measured_memory(run.step).peak_bytes


def test_it_does_not_where_there_is_room() -> None:
    at_once = smallest(in_backward=False)
    run = Run(at_once).steps(1)
    assert not run.strategy.updates_in_backward
    run.step(max_norm=1.0)  # all gradients are there
    assert run.peak_bytes == at_once


def test_the_smallest_budget_is_that_of_updates_in_backward() -> None:
    one_by_one = smallest(in_backward=True)
    assert smallest(in_backward="auto") == one_by_one
    assert Run(one_by_one).steps(2).same_as(Run().steps(2))


def test_a_later_clip_is_refused() -> None:
    run = Run(between()).steps(1)
    with pytest.raises(RuntimeError, match=r"cannot be clipped with memory.optimizer_in_backward"):
        run.step(max_norm=1.0)


def test_it_does_not_where_gradients_are_accumulated() -> None:
    run = Run(between())
    with pytest.raises(BudgetError), run.fabric.no_backward_sync(run.model):
        run.step()
    assert not run.strategy.updates_in_backward


def test_an_optimizer_of_all_parameters_at_once_is_no_error() -> None:
    run = Run(None, make=lambda ps: LBFGS(ps, lr=0.1))
    run.fabric.backward(run.model(run.inputs))
    assert all(p.grad is not None for p in run.net.parameters())


def test_a_gradient_scaler_is_no_error() -> None:
    updates, optimizer = UpdatesInBackward(), AdamW([nn.Parameter(torch.zeros(1))])
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    update_in_backward(optimizer, updates, scaled, (), is_asked=False)
    assert not updates.may_be_taken
    with pytest.raises(ConfigError, match="16-mixed"):
        update_in_backward(optimizer, updates, scaled, (), is_asked=True)


class TwoGraphs(nn.Module):
    """Reads a value on the host between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x if float(x.detach().sum()) > 0 else -x)


def test_a_model_in_pieces_is_trained_as_ever() -> None:
    after = []
    for in_backward in ("auto", False):
        memory = {"budget": NO_LIMIT, "optimizer_in_backward": in_backward}
        fabric = make_fabric(sharding="none", memory=memory)
        torch.manual_seed(0)
        net = TwoGraphs()
        model, optimizer = fabric.setup(net, AdamW(net.parameters()))
        for _ in range(2):
            fabric.backward(model(torch.ones(2, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
        after.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *after))


def test_it_does_so_before_states_go_to_the_host() -> None:
    budget_bytes = between()
    with as_elsewhere():
        found = Run(budget_bytes, offload="auto").steps(2)
    assert found.strategy.updates_in_backward
    assert not isinstance(found.made, StatesOnHost)
    assert found.same_as(Run().steps(2))


def test_both_where_neither_is_enough() -> None:
    one_by_one = smallest(in_backward=True)
    with as_elsewhere():
        both, at_once = (smallest(in_backward=b, offload="optimizer") for b in (True, False))
        assert both < min(one_by_one, at_once)
        budget_bytes = (both + min(one_by_one, at_once)) // 2
        with pytest.raises(BudgetError):
            Run(budget_bytes, in_backward=False, offload="auto").step()
        found = Run(budget_bytes, offload="auto").steps(3)
    assert found.strategy.updates_in_backward
    assert isinstance(found.made, StatesOnHost)
    assert found.same_as(Run().steps(3))


def test_a_run_goes_on_from_a_checkpoint_with_its_states_on_the_device(tmp_path: Path) -> None:
    """They are loaded before the plan is made: where they fit beside updates in backward alone, backward updates."""
    whole, budget_bytes = Run().steps(4), between()
    with as_elsewhere():
        first = Run(budget_bytes, offload="auto").steps(2)
        first.fabric.save(tmp_path / "saved", first.state)
        second = Run(budget_bytes, offload="auto")
        second.fabric.load(tmp_path / "saved", second.state)
        assert second.strategy.updates_in_backward
        second.steps(2)
    assert not isinstance(second.made, StatesOnHost)
    assert second.same_as(whole)


def test_it_does_not_where_a_hook_changes_gradients_before_the_step() -> None:
    at_once = smallest(in_backward=False)

    def step(budget_bytes: int) -> Run:
        run = Run(budget_bytes)
        run.made.register_step_pre_hook(lambda *_: None)
        return run.steps(1)

    with pytest.raises(BudgetError, match=f"one was found is {at_once:,} bytes"):
        step(between())
    assert not step(at_once).strategy.updates_in_backward


def test_a_later_optimizer_that_cannot_is_refused_when_it_is_set_up() -> None:
    run = Run(between()).steps(1)
    other = nn.Linear(8, 8)
    with pytest.raises(ConfigError, match=r"memory.optimizer_in_backward updates each parameter"):
        run.fabric.setup(other, LBFGS(other.parameters()))


def test_an_optimizer_that_takes_its_place_updates_in_backward_too() -> None:
    run = Run(between()).steps(1)
    del run.made, run.optimizer
    gc.collect()
    run.optimizer = run.fabric.setup_optimizers(SGD(run.net.parameters(), lr=0.1))
    before = [p.detach().clone() for p in run.net.parameters()]
    run.fabric.backward(run.model(run.inputs))
    assert all(p.grad is None for p in run.net.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, run.net.parameters(), strict=True))


@on_fabric_rank
def check_ranks() -> None:
    for sharding in ("zero3", "none"):
        budget_bytes = between(sharding=sharding, devices=2)
        found = Run(budget_bytes, sharding=sharding, devices=2).steps(2)
        assert found.strategy.updates_in_backward, sharding
        assert found.peak_bytes <= budget_bytes
        assert found.same_as(Run(in_backward=False, sharding=sharding, devices=2).steps(2))


def test_ranks_choose_the_same() -> None:
    run_on_fabric_ranks(check_ranks, 2)
