"""`memory.offload: fastest`: a part of the states goes to the host where a step is faster for it; bits stay."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import AdamW

from harness.copy_engines import PoisonedBuffers, ShuffledEngine
from harness.elsewhere import as_elsewhere
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_peak_bytes
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.ops.host_copies.engine import Host, other_host
from thunder_memsave.optim.on_host import StatesOnHost
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.sharding.sharded_parameter import as_rows

WIDTH, NUM_LAYERS, TOKENS = 96, 4, 512
ALL_STATES = 2 * 4 * WIDTH * WIDTH * 7 * NUM_LAYERS
"""Bytes of AdamW's states."""
ENOUGH = 5e8
"""Bytes per second that forward has no time to copy all activations at."""


class Block(nn.Module):
    """Two weights of one shape and one of another, with much to keep between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(torch.tanh(x))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Run:
    """A model in training."""

    def __init__(
        self,
        budget_bytes: int | None = None,
        offload: str = "fastest",
        num_layers: int = NUM_LAYERS,
        **arguments: Any,
    ) -> None:
        torch.manual_seed(0)
        memory: dict[str, Any] = {"optimizer_in_backward": "auto"}
        if budget_bytes is not None:
            memory |= {"budget": budget_bytes, "offload": offload, "host_budget": 2**30}
        arguments = {"nonfinite_gradients": "ignore", **arguments}
        self.fabric: Fabric = make_fabric(memory=memory, **arguments)
        self.net = Net(num_layers)
        made = AdamW(self.net.parameters(), lr=1e-3)
        self.model, self.optimizer = self.fabric.setup(self.net, made)
        self.x = torch.randn(TOKENS, WIDTH)

    def step(self) -> Tensor:
        loss: Tensor = self.model(self.x)
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def bits(self) -> list[Tensor]:
        """Losses, weights and states after some steps."""
        losses = [self.step() for _ in range(3)]
        states = self.optimizer.optimizer.state_dict()["state"]
        moments = [states[n][key] for n in sorted(states) for key in ("exp_avg", "exp_avg_sq")]
        return [*losses, *(as_rows(p).detach().clone() for p in self.net.parameters()), *moments]

    @property
    def call(self) -> Any:
        assert isinstance(self.fabric.strategy, ThunderMemsaveStrategy)
        return self.fabric.strategy._planned_call()

    @property
    def states_on_host(self) -> int:
        optimizer = self.optimizer.optimizer
        return optimizer.host_bytes if isinstance(optimizer, StatesOnHost) else 0

    def peaks(self) -> tuple[int, int]:
        """Return the predicted and the measured peak of a step."""
        for _ in range(2):
            self.step()
        measured = measured_peak_bytes(self.step)
        held = sum(as_rows(p).nbytes for p in self.net.parameters()) + self.x.nbytes
        return self.call.profile.peak_bytes, measured + held + self.call.memory.optimizer_bytes


@contextmanager
def copying(bytes_per_s: float) -> Iterator[None]:
    """A device that is not the host, with such a way to it."""
    rates = CopyRates(bytes_per_s=bytes_per_s, copy_us=0.0)
    with as_elsewhere(), patch.object(CopyRates, "of", lambda _: rates):
        yield


@pytest.fixture
def engine() -> Iterator[ShuffledEngine]:
    """Copies come in another order, and what is read too early is poison."""
    engine = ShuffledEngine(seed=7)
    host = Host(engine, PoisonedBuffers(), PoisonedBuffers())
    with copying(ENOUGH), other_host(torch.device("cpu"), host):
        yield engine


def budget(part: float) -> int:
    """Bytes between those of a step that keeps all and those of one with nothing kept."""
    run = Run()
    run.step()
    most = run.call.profile.peak_bytes
    return int(most - (1 - part) * run.call.plan.saved_bytes)


def test_a_part_of_the_states_makes_room_for_activations(
    engine: ShuffledEngine, caplog: pytest.LogCaptureFixture
) -> None:
    here = Run()
    bits = here.bits()
    budget_bytes = budget(0.4)
    with caplog.at_level(logging.INFO):
        away = Run(budget_bytes)
        assert all(map(torch.equal, bits, away.bits()))
    assert 0 < away.states_on_host < ALL_STATES
    assert away.call.profile.peak_bytes <= budget_bytes
    lines = [r.getMessage() for r in caplog.records]
    assert any(line.startswith("a step takes longer with all of the optimizer's") for line in lines)
    assert any(line.startswith("copies of its states run beside") for line in lines)
    alone = Run(budget_bytes, "activations")
    assert all(map(torch.equal, bits, alone.bits()))
    assert alone.states_on_host == 0
    assert alone.call.plan.added_us > away.call.plan.added_us
    assert not engine._waiting


def test_the_predicted_peak_is_the_measured_one(engine: ShuffledEngine) -> None:
    run = Run(budget(0.4))
    predicted, measured = run.peaks()
    assert predicted == measured
    assert run.states_on_host > 0


def test_states_stay_where_all_is_kept(engine: ShuffledEngine) -> None:
    run = Run(budget(1.1))
    run.step()
    assert run.states_on_host == 0
    assert not run.call.memory.updates


def test_states_stay_where_copies_are_slow(
    engine: ShuffledEngine,
) -> None:
    with copying(1e3):
        run = Run(budget(0.4))
        run.step()
    assert run.states_on_host == 0


def test_a_host_without_room_keeps_none(engine: ShuffledEngine) -> None:
    budget_bytes = budget(0.4)
    run = Run()
    memory = {"budget": budget_bytes, "offload": "fastest", "host_budget": 1}
    torch.manual_seed(0)
    fabric = make_fabric(memory={"optimizer_in_backward": "auto", **memory})
    net = Net()
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-3))
    fabric.backward(model(run.x))
    optimizer.step()
    assert not isinstance(optimizer.optimizer, StatesOnHost)


@on_fabric_rank
def check_ranks() -> None:
    with copying(ENOUGH):
        arguments: dict[str, Any] = {"devices": 2, "sharding": "zero2", "num_layers": 2}
        here = Run(**arguments)
        bits = here.bits()
        plan = here.call.plan
        budget_bytes = int(here.call.profile.peak_bytes - 0.6 * plan.saved_bytes)
        away = Run(budget_bytes, **arguments)
        assert all(map(torch.equal, bits, away.bits()))
        assert away.states_on_host > 0


@pytest.mark.soak
def test_ranks_choose_the_same_part() -> None:
    run_on_fabric_ranks(check_ranks, 2)
