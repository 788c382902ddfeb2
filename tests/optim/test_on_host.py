"""States on the host: the bits of states on the device, whatever copies when; the bytes that a plan counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from harness.copy_engines import PoisonedBuffers, ShuffledEngine
from harness.distributed import run_on_ranks
from harness.fabric import clipped_step, make_fabric
from harness.memory import measured_memory
from harness.odd_model import Net, assert_same, fresh, make_net, make_optimizer, train, trained
from thunder_memsave import optim as ours
from thunder_memsave.checkpoints import load_checkpoint, save_checkpoint
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import HostMemoryError
from thunder_memsave.measure.step_memory import step_memory
from thunder_memsave.ops.host_copies.engine import Host, other_host
from thunder_memsave.optim import on_host
from thunder_memsave.optim.on_host import (
    StatesOnHost,
    begin_step,
    class_of,
    forget_begun,
    states_on_host,
)
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.rows import shard_module

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW loop": partial(torch.optim.AdamW, foreach=False),
    "Adam amsgrad": partial(torch.optim.Adam, amsgrad=True),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD without states": partial(torch.optim.SGD, lr=0.1),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.3, centered=True),
    "Adagrad, states before the first step": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "ours int8": partial(ours.AdamW, states="int8"),
    "ours fp8": partial(ours.AdamW, states="fp8"),
    "ours bfloat16": partial(ours.SGD, lr=0.1, momentum=0.9, states="bfloat16"),
}


class Odd(nn.Module):
    """Weights of several pieces, one larger than a piece, one that is not contiguous, some that stay on the device."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter(torch.randn(300, 100))
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.conv = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.unused = nn.Parameter(torch.randn(64, 64))


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in module.named_parameters():
        if name != "unused":
            p.grad = torch.empty_like(p).normal_(generator=generator)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "PIECE_BYTES", 50_000)


@pytest.fixture
def hostile() -> Iterator[Host]:
    """Copies in another order, as late as the wait; what is read too early or too late is poison."""
    host = Host(ShuffledEngine(seed=3), PoisonedBuffers(), PoisonedBuffers())
    with other_host(torch.device("cpu"), host):
        yield host


def states_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state.get(p, {}) for p in module.parameters()]


def assert_equal(one: nn.Module, a: Any, other: nn.Module, b: Any) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), name
    for mine, theirs in zip(states_of(one, a), states_of(other, b), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, theirs[key]), key
                assert value.stride() == theirs[key].stride(), key
            else:
                assert value == theirs[key], key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_states_have_the_same_bits(name: str, hostile: Host) -> None:
    make = OPTIMIZERS[name]
    here, there = Odd(), Odd()
    used, known = make(here.parameters()), make(there.parameters())
    states_on_host(used)
    for step in range(3):
        for module, optimizer in ((here, used), (there, known)):
            give_gradients(module, step)
            optimizer.step()
    assert_equal(here, used, there, known)
    large = sum(
        value.nbytes
        for state in states_of(there, known)
        for value in state.values()
        if isinstance(value, Tensor) and value.nbytes >= on_host.LEAST_BYTES
    )
    assert isinstance(used, StatesOnHost)
    assert used.host_bytes == hostile.states.count() == large
    assert class_of(used) is type(known)
    assert isinstance(used, type(known))

    # Either loads what the other saved, into new optimizers and onto states that there are.
    for source, target in ((used, known), (known, used)):
        saved = copy.deepcopy(source.state_dict())
        target.load_state_dict(saved)
    assert_equal(here, used, there, known)
    assert used.host_bytes == hostile.states.count() == large
    for module, optimizer in ((here, used), (there, known)):
        give_gradients(module, 9)
        optimizer.step()
    assert_equal(here, used, there, known)


@pytest.mark.parametrize("name", ["AdamW fused", "AdamW foreach", "SGD momentum", "ours int8"])
def test_the_update_takes_the_predicted_bytes(name: str) -> None:
    module = Odd()
    for p in module.parameters():  # a plan takes each one to have a gradient
        p.grad = torch.ones_like(p)
    optimizer = OPTIMIZERS[name](module.parameters())
    states_on_host(optimizer)
    found = step_memory([optimizer])
    first = measured_memory(optimizer.step)
    second = measured_memory(optimizer.step)
    assert isinstance(optimizer, StatesOnHost)
    assert found.host_bytes == optimizer.host_bytes
    assert found.optimizer_bytes == first.end_bytes
    assert found.update_peak_bytes == max(first.peak_bytes - first.end_bytes, second.peak_bytes)
    whole = OPTIMIZERS[name](module.parameters())
    assert found.optimizer_bytes < 0.2 * step_memory([whole]).optimizer_bytes


def test_a_planned_device_counts_no_state_on_the_host() -> None:
    with torch.device("meta"):
        module = Odd()
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    states_on_host(optimizer)
    found = step_memory([optimizer], device_type="cuda")
    large = [p.numel() * 4 for p in module.parameters() if p.numel() * 4 >= on_host.LEAST_BYTES]
    assert found.host_bytes == 2 * sum(large)
    assert found.optimizer_bytes < 20_000
    assert 2 * max(large) <= found.update_peak_bytes < 2 * max(large) + 4 * on_host.PIECE_BYTES


def test_hooks_schedules_and_closures_see_one_step() -> None:
    module = Odd()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)  # replaces `step` of the object
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    states_on_host(optimizer)
    reference = Odd()
    known = torch.optim.AdamW(reference.parameters(), lr=0.1)

    def closure() -> float:
        seen.append("closure")
        give_gradients(module, 0)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert seen == ["before", "closure", "after"]
    schedule.step()  # warns if it has not seen the optimizer's step
    assert optimizer.param_groups[0]["lr"] == 0.05
    give_gradients(reference, 0)
    known.step()
    assert_equal(module, optimizer, reference, known)


def test_a_step_that_fails_leaves_an_optimizer_that_goes_on(
    hostile: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Odd(), Odd()
    used, known = (torch.optim.AdamW(m.parameters()) for m in (here, there))
    states_on_host(used)
    for module, optimizer in ((here, used), (there, known)):
        give_gradients(module, 0)
        optimizer.step()

    def failing(optimizer: torch.optim.Optimizer) -> None:
        raise MemoryError("in the middle")

    monkeypatch.setattr(type(used), "_updates", staticmethod(failing))
    with pytest.raises(MemoryError, match="in the middle"):
        used.step()
    monkeypatch.undo()
    assert [len(g["params"]) for g in used.param_groups] == [
        len(g["params"]) for g in known.param_groups
    ]
    for module, optimizer in ((here, used), (there, known)):
        give_gradients(module, 1)
        optimizer.step()
    assert_equal(here, used, there, known)


def _as_it_is(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    begin_step(optimizer)  # a second time


def _with_other_gradients(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(module.parameters()).grad = None


def _after_a_load(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] *= 2.0
    optimizer.load_state_dict(saved)


def _after_another_forward(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    forget_begun()


def _of_a_copy(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    copied = copy.deepcopy(optimizer)
    copied.step()


def _with_another_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _with_a_state_written(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


@pytest.mark.parametrize(
    "change",
    [
        _as_it_is,
        _with_other_gradients,
        _after_a_load,
        _after_another_forward,
        _of_a_copy,
        _with_another_state,
        _with_a_state_written,
    ],
)
def test_a_step_whose_first_states_come_before_it_has_the_same_bits(
    change: Callable[[nn.Module, torch.optim.Optimizer], None], hostile: Host
) -> None:
    here, there = Odd(), Odd()
    used, known = (torch.optim.AdamW(m.parameters()) for m in (here, there))
    states_on_host(used)
    for step in range(3):
        for module, optimizer in ((here, used), (there, known)):
            give_gradients(module, step)
            before = hostile.engine.num_begun["in"]  # type: ignore[attr-defined]
            begin_step(optimizer)
            began = hostile.engine.num_begun["in"] - before  # type: ignore[attr-defined]
            assert began == (2 if step and optimizer is used else 0)  # the two of `large`
            if step:
                change(module, optimizer)
            optimizer.step()
    assert_equal(here, used, there, known)
    large = [s for s in states_of(there, known) if s and s["exp_avg"].nbytes >= on_host.LEAST_BYTES]
    begin_step(used)
    assert hostile.states.count() == used.host_bytes == 2 * sum(s["exp_avg"].nbytes for s in large)  # type: ignore[attr-defined]


def test_the_first_states_come_while_gradients_are_clipped(hostile: Host) -> None:
    memory = {"offload": "optimizer", "host_budget": 10_000_000}
    fabric = make_fabric(sharding="none", nonfinite_gradients="skip", memory=memory)
    net = nn.Linear(300, 400)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    begun: list[int] = []

    def step(scale: float = 1.0) -> None:
        fabric.backward(scale * model(torch.ones(2, 300)).sum())
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        begun.append(hostile.engine.num_begun["in"])  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()

    for scale in (1.0, 1.0, float("inf"), 1.0):
        step(scale)
    # The first step has no states yet; those that come for the skipped one are let go by the next forward.
    assert begun == [0, 1, 2, 3]
    assert hostile.engine.num_begun["in"] == 3  # type: ignore[attr-defined]


class Together(torch.optim.Optimizer):
    """An optimizer of a user's, which may do anything."""


@pytest.mark.parametrize("make", [Together, torch.optim.LBFGS])
def test_others_are_refused(make: Any) -> None:
    optimizer = (
        Together([nn.Parameter(torch.ones(2))], {})
        if make is Together
        else make([nn.Parameter(torch.ones(2))])
    )
    with pytest.raises(ConfigError, match=r"memory\.offload .* " + make.__name__):
        states_on_host(optimizer)


@pytest.mark.parametrize("states", ["float32", "int8"])
def test_the_peak_of_a_whole_step_is_the_planned_one_to_the_byte(states: str) -> None:
    memory = {"offload": "optimizer", "host_budget": 10_000_000}
    fabric = make_fabric(sharding="none", nonfinite_gradients="ignore", memory=memory)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 40))
    made = torch.optim.AdamW(net.parameters(), fused=True)
    if states == "int8":
        made = ours.AdamW(net.parameters(), states="int8")  # type: ignore[assignment]
    model, optimizer = fabric.setup(net, made)
    inputs = torch.randn(2, 300)

    whole_step = partial(clipped_step, fabric, model, optimizer, inputs)
    whole_step()
    kept = [value for values in optimizer.state.values() for value in values.values()]
    here = [value for value in kept if value.nbytes < on_host.LEAST_BYTES]
    before = sum(t.numel() * t.element_size() for t in (*net.parameters(), *here, inputs))
    strategy: Any = fabric.strategy
    assert strategy.plan.predicted_peak_bytes == before + measured_memory(whole_step).peak_bytes
    assert "on the host: " in strategy.explain()


def test_states_beyond_the_hosts_budget_are_refused_before_the_first_step() -> None:
    memory = {"offload": "optimizer", "host_budget": 100_000}
    fabric = make_fabric(sharding="none", memory=memory)
    net = nn.Linear(300, 400)
    model, _ = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    with pytest.raises(HostMemoryError, match=r"960,000 bytes .* memory\.host_budget is 100,000"):
        model(torch.randn(2, 300))


def host_trained(dp: DataParallel | None, steps: int, name: Any) -> tuple[Net, Any]:
    net = make_net(width=300)
    shard_module(net, dp)
    optimizer = make_optimizer(net, name=name)
    states_on_host(optimizer)
    train(net, optimizer, range(steps), dp)
    return net, optimizer


def check_checkpoints(rank: int, root: Path) -> None:
    """Save on two ranks, and go on there and on one, with states on the host and on the device."""
    on_host.LEAST_BYTES = 64
    assert dist.group.WORLD is not None
    dp = DataParallel(mode="zero3", group=dist.group.WORLD)
    for name, format in (("AdamW", "sharded"), ("int8", "full")):
        half, whole = (trained(steps=n, name=name, width=300) for n in (3, 5))  # type: ignore[arg-type]
        net, used = host_trained(dp, 3, name)
        assert used.host_bytes > 0
        assert_same(net, used, half, dp)
        save_checkpoint(
            root / name,
            {"model": net, "optimizer": used},
            state_dict_type=format,  # type: ignore[arg-type]
            data_parallel=dp,
        )
        dist.barrier()
        for other in (dp, None):
            for is_on_host in (True, False):
                if rank and other is None:
                    continue
                net, used = fresh(other, name=name, width=300)  # type: ignore[arg-type]
                if is_on_host:
                    states_on_host(used)
                state = {"model": net, "optimizer": used}
                load_checkpoint(root / name, state, data_parallel=other)
                assert bool(getattr(used, "host_bytes", 0)) == is_on_host
                assert_same(net, used, half, other)
                train(net, used, range(3, 5), other)
                assert_same(net, used, whole, other)
        dist.barrier()


def test_checkpoints_go_to_and_come_from_the_host(tmp_path: Path) -> None:
    run_on_ranks(check_checkpoints, 2, tmp_path / "rendezvous", tmp_path)
