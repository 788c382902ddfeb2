"""`memory.offload: auto`: nothing goes to the host but where no plan fits without, and then the bits stay.

The CPU is taken for a device that is not the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from harness import models
from harness.copy_engines import small_values
from harness.elsewhere import as_elsewhere
from harness.fabric import clipped_step, make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.fabric_run import FabricRun
from harness.memory import measured_memory
from harness.smallest_budget import smallest_budget
from thunder_memsave.errors import BudgetError
from thunder_memsave.ops.host_copies.engine import host_of
from thunder_memsave.optim import on_host
from thunder_memsave.optim.on_host import StatesOnHost

NO_LIMIT = 2**40
HOST_BYTES = 10_000_000


@pytest.fixture
def elsewhere() -> Iterator[None]:
    with as_elsewhere():
        yield


class Run(FabricRun):
    """A net with 4.6 times as many bytes of states as a piece has, and its steps."""

    def __init__(
        self,
        budget_bytes: int = NO_LIMIT,
        offload: str = "auto",
        make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **arguments: Any,
    ) -> None:
        memory = {"budget": budget_bytes, "offload": offload}
        if offload != "none":
            memory["host_budget"] = HOST_BYTES
        self.fabric = make_fabric(
            **{"sharding": "none", "nonfinite_gradients": "ignore", **arguments}, memory=memory
        )
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(120, 120) for _ in range(4)))
        self.made = make(self.net.parameters())
        self.schedule = LambdaLR(self.made, lambda n: 1 / (1 + n))
        self.model, self.optimizer = self.fabric.setup(self.net, self.made)
        self.inputs = torch.randn(2, 120) + self.fabric.global_rank

    def step(self) -> None:
        clipped_step(self.fabric, self.model, self.optimizer, self.inputs)

    @override
    def steps(self, count: int) -> Self:
        for _ in range(count):
            self.step()
            self.schedule.step()
        return self

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    @property
    def is_on_host(self) -> bool:
        return isinstance(self.made, StatesOnHost)


def test_states_go_to_the_host_where_nothing_else_fits(
    elsewhere: None, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = Run(offload="none").steps(3), Run(offload="optimizer").steps(1)
    budget_bytes = (here.peak_bytes + there.peak_bytes) // 2
    with pytest.raises(BudgetError):
        Run(budget_bytes, offload="none").step()
    caplog.set_level(logging.INFO)
    found = Run(budget_bytes).steps(3)
    assert found.is_on_host
    assert there.peak_bytes <= found.peak_bytes <= budget_bytes
    assert found.same_as(here)
    assert "nothing fits with all of the optimizer's states on the device" in caplog.text
    strategy: Any = found.fabric.strategy
    assert "on the host: " in strategy.explain()


def test_the_peak_is_the_planned_one_to_the_byte(elsewhere: None) -> None:
    run = Run(Run(offload="none").steps(1).peak_bytes - 1).steps(1)
    kept = [value for values in run.made.state.values() for value in values.values()]
    here = [value for value in kept if on_host._lease_of(value) is None]
    before = sum(t.nbytes for t in (*run.net.parameters(), *here, run.inputs))
    assert run.is_on_host
    assert run.peak_bytes == before + measured_memory(run.step).peak_bytes


def test_they_stay_on_the_device_where_there_is_room(elsewhere: None) -> None:
    enough_bytes = Run(offload="none").steps(1).peak_bytes
    assert not Run(enough_bytes).steps(1).is_on_host


def test_the_cpu_is_the_host() -> None:
    enough_bytes = Run(offload="none").steps(1).peak_bytes
    with pytest.raises(BudgetError):
        Run(enough_bytes - 1).step()


def test_the_error_names_the_budget_with_all_on_the_host(elsewhere: None) -> None:
    with pytest.raises(BudgetError) as raised:
        Run(1000).step()
    smallest_bytes = raised.value.smallest_bytes
    assert smallest_bytes is not None
    run = Run(smallest_bytes).steps(1)
    assert run.is_on_host
    assert run.peak_bytes == smallest_bytes


def test_states_that_the_host_has_no_room_for_stay(elsewhere: None) -> None:
    less_bytes = Run(offload="none").steps(1).peak_bytes - 1
    with patch(f"{__name__}.HOST_BYTES", 100_000), pytest.raises(BudgetError):
        Run(less_bytes).step()


def test_states_of_which_nothing_is_known_stay(elsewhere: None) -> None:
    class Unknown(torch.optim.SGD):
        """As it is not of torch.optim, it may read other parameters."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return Unknown(parameters, lr=0.1, momentum=0.9)

    less_bytes = Run(offload="none", make=make).steps(1).peak_bytes - 1
    with pytest.raises(BudgetError):
        Run(less_bytes, make=make).step()


def llama_step(budget_bytes: int, offload: str) -> tuple[list[torch.Tensor], Any]:
    memory: dict[str, Any] = {"budget": budget_bytes, "offload": offload}
    if offload != "none":
        memory["host_budget"] = 2**28
    fabric = make_fabric(sharding="none", memory=memory)
    torch.manual_seed(0)
    net = models.llama(1)
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ids = models.token_batch(4, 32, seed=0)
    fabric.backward(model(input_ids=ids, labels=ids).loss)
    strategy: Any = fabric.strategy
    return [p.grad for p in net.parameters() if p.grad is not None], strategy.plan


def test_activations_go_to_the_host_where_recomputing_them_is_not_enough(elsewhere: None) -> None:
    with small_values():
        expected, _ = llama_step(NO_LIMIT, "none")
        with pytest.raises(BudgetError) as raised:
            llama_step(1000, "none")
        smallest_bytes = raised.value.smallest_bytes
        assert smallest_bytes is not None
        _, plan = llama_step(smallest_bytes, "auto")
        assert not plan.actions.offloaded
        found, plan = llama_step(smallest_bytes - 4096, "auto")
        assert plan.actions.offloaded
        assert plan.predicted_peak_bytes <= smallest_bytes - 4096
        assert host_of(torch.device("cpu")).buffers.limit_bytes == 2**28
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("is_early", [True, False], ids=["before they are loaded", "at the plan"])
def test_a_run_goes_on_from_a_checkpoint(is_early: bool, elsewhere: None, tmp_path: Path) -> None:
    """States are loaded to the host if weights, gradients and states exceed the budget; else the plan moves them."""
    whole = Run(offload="none").steps(3)
    budget_bytes = whole.peak_bytes - (50_000 if is_early else 1)
    saved(Run(budget_bytes).steps(2), tmp_path / "saved")
    again = loaded(Run(budget_bytes), tmp_path / "saved")
    assert again.is_on_host == is_early
    again.steps(1)
    assert again.is_on_host
    assert again.same_as(whole)


def saved(run: Run, path: Path) -> None:
    run.fabric.save(path, run.state)


def loaded(run: Run, path: Path) -> Run:
    run.fabric.load(path, run.state)
    return run


@on_fabric_rank
def check_ranks(directory: Path) -> None:
    with as_elsewhere():
        for sharding in ("zero2", "zero3"):
            asked: dict[str, Any] = {"devices": 2, "sharding": sharding, "timeout": "2min"}
            here = Run(offload="none", **asked).steps(3)
            without_room = Run(1000, offload="none", **asked)
            budget_bytes = smallest_budget(without_room.fabric, without_room.step) - 1
            found = Run(budget_bytes, **asked).steps(2)
            assert found.is_on_host
            assert found.peak_bytes <= budget_bytes
            saved(found, directory / sharding)
            assert found.steps(1).same_as(here)
            again = loaded(Run(budget_bytes, **asked), directory / sharding)
            assert again.steps(1).same_as(here)
            assert again.is_on_host


def test_two_ranks_that_shard_decide_alike(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_ranks, 2, tmp_path)
