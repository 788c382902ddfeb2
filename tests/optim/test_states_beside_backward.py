"""States on the host are copied beside a backward that updates weights: the same bits, and the predicted bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import thunder_memsave.optim as own
from harness.copy_engines import PoisonedBuffers, ShuffledEngine
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_peak_bytes
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.budget.offload import last_resort
from thunder_memsave.ops.host_copies.engine import Host, other_host
from thunder_memsave.optim.on_host import Copy, StatesOnHost, drop
from thunder_memsave.passes.overlap import state_copies
from thunder_memsave.sharding.sharded_parameter import as_rows

WIDTH, NUM_LAYERS = 64, 6
STATES = 2 * 4 * WIDTH * WIDTH
"""Bytes of AdamW's states of a weight."""
ON_HOST = {"optimizer_in_backward": True, "offload": "optimizer"}

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda ps: AdamW(ps, lr=1e-2),
    "fused": lambda ps: AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "no states": lambda ps: SGD(ps, lr=0.1),
    "int8": lambda ps: own.AdamW(ps, lr=1e-2, states="int8"),
}


class Net(nn.Module):
    """Layers of one width, with norms whose states are small."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x)))
        return x.square().mean()


class Run:
    """A model in training."""

    def __init__(self, name: str, memory: dict[str, Any], **arguments: Any) -> None:
        torch.manual_seed(0)
        self.fabric: Fabric = make_fabric(memory=memory, **arguments)
        self.net = Net()
        self.model, self.optimizer = self.fabric.setup(
            self.net, OPTIMIZERS[name](self.net.parameters())
        )
        self.x = torch.randn(4, WIDTH)

    def step(self) -> Tensor:
        loss: Tensor = self.model(self.x)
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        """Return losses, weights and states after some steps."""
        losses = [self.step() for _ in range(4)]
        weights = [as_rows(p).detach().clone() for p in self.net.parameters()]
        return losses, weights, self.optimizer.optimizer.state_dict()["state"]

    @property
    def symbols(self) -> list[str]:
        (compiled,) = self.model._forward_module.captures
        return [b.sym.name for b in compiled.backward_traces[-1].bound_symbols]

    @property
    def call(self) -> Any:
        assert isinstance(self.fabric.strategy, ThunderMemsaveStrategy)
        return self.fabric.strategy._planned_call()

    def peaks(self) -> tuple[int, int]:
        """Return the predicted and the measured peak of a step."""
        for _ in range(2):
            self.step()
        measured = measured_peak_bytes(self.step)
        held = sum(as_rows(p).nbytes for p in self.net.parameters()) + self.x.nbytes
        return self.call.profile.peak_bytes, measured + held + self.call.memory.optimizer_bytes


@pytest.fixture
def engine() -> Iterator[ShuffledEngine]:
    """Copies in another order, as late as the wait; what is read too early or too late is poison."""
    engine = ShuffledEngine(seed=3)
    with other_host(torch.device("cpu"), Host(engine, PoisonedBuffers(), PoisonedBuffers())):
        yield engine


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_have_the_bits_of_states_on_the_device(
    name: str, engine: ShuffledEngine
) -> None:
    away = Run(name, ON_HOST)
    torch.testing.assert_close(away.train(), Run(name, {}).train(), rtol=0, atol=0)
    assert ("fetch_states" in away.symbols) is (name != "no states")
    assert engine.num_begun["in"] == (
        0 if name == "no states" else 3 * num_states(away.optimizer.optimizer)
    )


def num_states(optimizer: Optimizer) -> int:
    """The number of tensors that are copied in each step."""
    assert isinstance(optimizer, StatesOnHost)
    states = [v for state in optimizer.state.values() for v in state.values()]
    return sum(isinstance(v, Tensor) and v.nbytes >= 4096 for v in states)


def test_the_next_states_come_and_the_last_ones_leave_while_a_weight_is_updated() -> None:
    run = Run("adamw", ON_HOST)
    run.step()
    symbols = [s for s in run.symbols if "states" in s or s == "update_parameter"]
    fetched = stored = waited = 0
    most = 0
    for symbol in symbols:
        fetched += symbol == "fetch_states"
        stored += symbol == "store_states"
        waited += symbol == "wait_states"
        if symbol == "store_states" and stored < NUM_LAYERS:
            assert fetched > stored
        most = max(most, fetched - waited)
    assert (fetched, stored, waited) == (NUM_LAYERS,) * 3
    assert most > 2
    first = run.symbols.index("fetch_states"), run.symbols.index("update_parameter")
    assert "mm" in "".join(run.symbols[slice(*first)]), "the first ones come beside a product"
    last = len(symbols) - 1 - symbols[::-1].index("update_parameter")
    assert symbols[last:].count("wait_states") > 1, "several leave at once"


@pytest.mark.parametrize("ahead", [0, 3 * STATES])
@pytest.mark.parametrize("name", ["adamw", "fused", "int8"])
def test_the_predicted_peak_is_the_measured_one(
    name: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_copies, "AHEAD_BYTES", ahead)
    predicted, measured = Run(name, ON_HOST).peaks()
    assert predicted == measured


def test_a_budget_without_room_fetches_later_and_waits_sooner() -> None:
    predicted, _ = Run("adamw", ON_HOST).peaks()
    budget_bytes = predicted - STATES
    run = Run("adamw", {**ON_HOST, "budget": budget_bytes})
    less, measured = run.peaks()
    assert less == measured
    assert less <= budget_bytes
    torch.testing.assert_close(
        Run("adamw", {**ON_HOST, "budget": budget_bytes}).train(),
        Run("adamw", {}).train(),
        rtol=0,
        atol=0,
    )


def test_a_failed_update_leaves_no_copy_and_no_states_on_the_device(
    engine: ShuffledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("adamw", ON_HOST)
    run.step()
    optimizer = run.optimizer.optimizer
    kind, updates = type(optimizer), type(optimizer)._updates
    before, calls = optimizer.host_bytes, iter(range(100))

    def fail(this: Optimizer) -> Any:
        if next(calls) == 3:
            raise RuntimeError("out of memory")
        return updates(this)

    monkeypatch.setattr(kind, "_updates", staticmethod(fail))
    with pytest.raises(RuntimeError, match="out of memory"):
        run.step()
    assert optimizer.host_bytes == before
    assert not engine._waiting


def test_a_gradient_that_is_asked_for_is_given_and_updates_nothing(engine: ShuffledEngine) -> None:
    run = Run("adamw", ON_HOST)
    run.step()
    optimizer = run.optimizer.optimizer
    before = [p.detach().clone() for p in run.net.parameters()]
    host_bytes = optimizer.host_bytes
    gradients = torch.autograd.grad(run.model(run.x), list(run.net.parameters()))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert all(map(torch.equal, before, run.net.parameters()))
    assert optimizer.host_bytes == host_bytes
    assert not engine._waiting


@on_fabric_rank
def check_ranks() -> None:
    for mode in ("zero2", "zero3"):
        away, here = (
            Run("fused", memory, devices=2, sharding=mode)
            for memory in (ON_HOST, {"optimizer_in_backward": True})
        )
        torch.testing.assert_close(away.train(), here.train(), rtol=0, atol=0)
        assert "fetch_states" in away.symbols


def test_ranks_have_the_same_bits() -> None:
    run_on_fabric_ranks(check_ranks, 2)


def test_states_that_go_to_the_host_where_nothing_else_fits_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away_bytes, _ = Run("adamw", ON_HOST).peaks()
    budget_bytes = away_bytes - 2 * STATES
    monkeypatch.setattr(last_resort, "is_host", lambda _: False)
    memory = {"optimizer_in_backward": True, "budget": budget_bytes, "host_budget": 2**30}
    run = Run("adamw", memory)
    predicted, measured = run.peaks()
    assert run.call.memory.host_bytes == NUM_LAYERS * STATES
    assert predicted == measured
    assert predicted <= budget_bytes


def test_memory_that_is_copied_to_stays_until_a_dropped_copy_has_ended() -> None:
    alive = []

    def copy_of(result: Tensor) -> Copy:
        known = weakref.ref(result)
        return Copy(lambda: alive.append(known() is not None), {}, "exp_avg", result, None, 0)

    copies = [copy_of(torch.zeros(4)) for _ in range(2)]
    drop(copies)
    assert alive == [True, True]
    assert not copies


def test_a_forward_that_never_has_a_backward_leaves_updates_to_the_optimizer() -> None:
    """States were fetched for updates that backward then does not make."""
    after = []
    for offload in ("optimizer", "none"):
        memory: dict[str, Any] = {"optimizer_in_backward": True, "offload": offload}
        if offload != "none":
            memory["host_budget"] = 2**28
        fabric = make_fabric(memory=memory, nonfinite_gradients="ignore")
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)))
        model, optimizer = fabric.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
        held = []
        for _ in range(3):
            fabric.backward(model(torch.ones(8, 96)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            held.append(model(torch.ones(8, 96)).mean())
        after.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *after))
