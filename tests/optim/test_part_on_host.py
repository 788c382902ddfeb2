"""A part of the states on the host: those of the weights of some shapes, no more than a budget asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from harness.copy_engines import PoisonedBuffers, ShuffledEngine
from harness.elsewhere import as_elsewhere
from harness.fabric import clipped_step, make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.fabric_run import FabricRun
from harness.memory import measured_memory
from harness.smallest_budget import smallest_budget
from thunder_memsave import optim as ours
from thunder_memsave.ops.host_copies.engine import Host, other_host
from thunder_memsave.optim import on_host
from thunder_memsave.optim.on_host import StatesOnHost, kind_of, num_of_kinds, states_on_host

NO_LIMIT = 2**40
MAKE: dict[str, Callable[..., Optimizer]] = {
    "AdamW": AdamW,
    "AdamW fused": partial(AdamW, fused=True),
    "SGD": partial(SGD, lr=0.1, momentum=0.9),
    "ours int8": partial(ours.AdamW, states="int8"),
}


class Net(nn.Sequential):
    """Layers alike with two large weights each, of other shapes; its result is a loss."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(*sizes) for _ in range(6) for sizes in ((96, 160), (160, 96))))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]
        return found.square().mean()


UP, DOWN = ((160, 96), "torch.float32"), ((96, 160), "torch.float32")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "PIECE_BYTES", 150_000)


@pytest.fixture
def hostile() -> Iterator[Host]:
    host = Host(ShuffledEngine(seed=5), PoisonedBuffers(), PoisonedBuffers())
    with other_host(torch.device("cpu"), host):
        yield host


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.grad = torch.empty_like(p).normal_(generator=generator)


def shapes_there(optimizer: Optimizer) -> set[tuple[int, ...]]:
    """Return the shapes of the parameters with a state on the host."""
    return {
        tuple(p.shape)
        for p, state in optimizer.state.items()
        if any(on_host._lease_of(value) is not None for value in state.values())
    }


def assert_equal(one: nn.Module, a: Optimizer, other: nn.Module, b: Optimizer) -> None:
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert a.state[p].keys() == b.state[q].keys()
        for key, value in a.state[p].items():
            same = b.state[q][key]
            assert torch.equal(value, same) if isinstance(value, Tensor) else value == same


@pytest.mark.parametrize("name", MAKE)
def test_the_states_of_some_weights_go_and_the_bits_stay(name: str, hostile: Host) -> None:
    torch.manual_seed(0)
    here = Net()
    there = copy.deepcopy(here)
    used, known = MAKE[name](here.parameters()), MAKE[name](there.parameters())

    def steps(*seeds: int) -> None:
        for seed in seeds:
            for module, optimizer in ((here, used), (there, known)):
                give_gradients(module, seed)
                optimizer.step()
        assert_equal(here, used, there, known)

    assert num_of_kinds([used]) == {UP: 6, DOWN: 6}, "biases stay"
    states_on_host(used, [UP])
    steps(0, 1)
    assert shapes_there(used) == {(160, 96)}
    assert num_of_kinds([used]) == {DOWN: 6}

    saved = copy.deepcopy(known.state_dict())
    steps(2)
    used.load_state_dict(copy.deepcopy(saved))
    known.load_state_dict(saved)
    assert shapes_there(used) == {(160, 96)}
    steps(3)

    states_on_host(used, [DOWN])
    assert shapes_there(used) == {(160, 96), (96, 160)}, "more go, and none come back"
    steps(4)
    assert num_of_kinds([used]) == {}
    states_on_host(used)
    states_on_host(used, [UP])
    assert isinstance(used, StatesOnHost)
    assert used.kinds_on_host is None, "all stay there"
    steps(5)


class Run(FabricRun):
    """A net and its steps."""

    def __init__(
        self,
        budget_bytes: int = NO_LIMIT,
        offload: str = "auto",
        in_backward: Any = False,
        make: Callable[..., Optimizer] = AdamW,
        host_budget: int = 10_000_000,
        **arguments: Any,
    ) -> None:
        memory: dict[str, Any] = {"budget": budget_bytes, "offload": offload}
        memory["optimizer_in_backward"] = in_backward
        if offload != "none":
            memory["host_budget"] = host_budget
        self.in_backward = in_backward
        self.fabric = make_fabric(
            **{"sharding": "none", "nonfinite_gradients": "ignore", **arguments}, memory=memory
        )
        torch.manual_seed(0)
        self.net = Net()
        self.made = make(self.net.parameters())
        self.model, self.optimizer = self.fabric.setup(self.net, self.made)
        self.inputs = torch.randn(2, 96) + self.fabric.global_rank

    def step(self) -> None:
        if not self.in_backward:
            clipped_step(self.fabric, self.model, self.optimizer, self.inputs)
            return
        self.fabric.backward(self.model(self.inputs))
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize(
    ("name", "in_backward"),
    [
        *(("AdamW", each) for each in (False, True, "auto")),
        ("ours int8", False),
        *(pytest.param("ours int8", each, marks=pytest.mark.soak) for each in (True, "auto")),
    ],
)
def test_a_plan_moves_a_part_where_that_is_enough(name: str, in_backward: Any) -> None:
    with as_elsewhere():
        asked: dict[str, Any] = {"in_backward": in_backward, "make": MAKE[name]}
        known = Run(offload="none", **asked).steps(3)
        # With `auto`, updates in backward alone are not enough.
        alone = Run(offload="none", **{**asked, "in_backward": in_backward is not False}).steps(1)
        budget_bytes = alone.peak_bytes - 20_000
        run = Run(budget_bytes, **asked).steps(1)
        assert run.peak_bytes <= budget_bytes
        assert len(shapes_there(run.made)) == 1, "a part"
        assert isinstance(run.made, StatesOnHost)
        assert f"of the weights of {next(iter(shapes_there(run.made)))[0]} x " in (
            run.strategy.explain()
        )
        kept = [v for values in run.made.state.values() for v in values.values()]
        here = [v for v in kept if isinstance(v, Tensor) and on_host._lease_of(v) is None]
        before = sum(t.nbytes for t in (*run.net.parameters(), *here, run.inputs))
        measured = measured_memory(run.step).peak_bytes
        if in_backward is False:
            assert run.peak_bytes == before + measured
        else:  # norms of gradients are kept besides
            norms = 4 * len(list(run.net.parameters()))
            assert run.peak_bytes == before + norms + measured
        assert run.steps(1).same_as(known)  # with the measured one three


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_host_with_little_room_takes_what_it_can(in_backward: bool) -> None:
    """The states of one shape take 737,280 bytes, those of both twice as many."""
    with as_elsewhere():
        asked: dict[str, Any] = {"in_backward": in_backward, "host_budget": 900_000}
        without_room = Run(1000, **asked)
        smallest_bytes = smallest_budget(without_room.fabric, without_room.step)
        fits = Run(smallest_bytes, **asked).steps(2)
        assert fits.peak_bytes <= smallest_bytes
        assert len(shapes_there(fits.made)) == 1
        alone = Run(1000, offload="none", in_backward=in_backward)
        assert smallest_bytes <= smallest_budget(alone.fabric, alone.step) - 500_000


def test_a_copy_of_an_optimizer_has_the_same_part_there() -> None:
    net = Net()
    used = AdamW(net.parameters())
    states_on_host(used, [UP])
    give_gradients(net, 0)
    used.step()
    copied = copy.deepcopy(used)
    assert isinstance(copied, StatesOnHost)
    assert copied.kinds_on_host == frozenset({UP})


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_run_goes_on_from_a_checkpoint(in_backward: bool, tmp_path: Path) -> None:
    with as_elsewhere():
        whole = Run(offload="none", in_backward=in_backward).steps(4)
        budget_bytes = whole.peak_bytes - 60_000
        first = Run(budget_bytes, in_backward=in_backward).steps(2)
        assert len(shapes_there(first.made)) == 1
        first.fabric.save(tmp_path / "saved", first.state)
        again = Run(budget_bytes, in_backward=in_backward)
        again.fabric.load(tmp_path / "saved", again.state)
        if not in_backward:  # where gradients are what a device has no room for
            assert len(shapes_there(again.made)) == 1, "loaded to the host"
        again.steps(1)
        assert again.peak_bytes <= budget_bytes
        assert again.steps(1).same_as(whole)
        elsewhere = Run(offload="none", in_backward=in_backward)
        elsewhere.fabric.load(tmp_path / "saved", elsewhere.state)
        assert elsewhere.steps(2).same_as(whole)


@on_fabric_rank
def check_ranks(directory: Path, sharding: str, in_backward: bool) -> None:
    with as_elsewhere():
        asked: dict[str, Any] = {"devices": 2, "sharding": sharding, "in_backward": in_backward}
        here = Run(offload="none", **asked).steps(3)
        without_room = Run(1000, offload="none", **asked)
        budget_bytes = smallest_budget(without_room.fabric, without_room.step) - 1
        found = Run(budget_bytes, **asked).steps(2)
        assert len(shapes_there(found.made)) == 1, (sharding, shapes_there(found.made))
        assert found.peak_bytes <= budget_bytes
        found.fabric.save(directory / sharding, found.state)
        assert found.steps(1).same_as(here)
        again = Run(budget_bytes, **asked)
        again.fabric.load(directory / sharding, again.state)
        assert again.steps(1).same_as(here)
        assert shapes_there(again.made)


@pytest.mark.parametrize(
    ("sharding", "in_backward"),
    [
        pytest.param("zero2", False, marks=pytest.mark.soak),
        pytest.param("zero3", True, marks=pytest.mark.soak),
    ],
)
def test_two_ranks_move_the_same_part(tmp_path: Path, sharding: str, in_backward: bool) -> None:
    run_on_fabric_ranks(check_ranks, 2, tmp_path, sharding, in_backward)


def test_kinds_are_shapes_and_dtypes() -> None:
    weight = nn.Parameter(torch.empty(3, 4, dtype=torch.bfloat16))
    assert kind_of(weight) == ((3, 4), "torch.bfloat16")
