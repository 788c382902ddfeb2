"""The memory of an update, predicted without running it, is the measured one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import thunder_memsave.optim as ours
from harness.allocator_events import live_after
from harness.memory import measured_memory
from thunder_memsave.measure import step_memory as step_memory_module
from thunder_memsave.measure.step_memory import StepMemoryError, step_memory
from thunder_memsave.optim import by_rows
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.sharding.gradients import clip_norm


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 40, bias=False), nn.LayerNorm(40))


def give_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(AdamW, foreach=False, fused=False), id="adamw-for-loop"),
        pytest.param(partial(AdamW, foreach=True), id="adamw-foreach"),
        pytest.param(partial(AdamW, fused=True), id="adamw-fused"),
        pytest.param(AdamW, id="adamw-default"),
        pytest.param(partial(SGD, lr=0.1, momentum=0.9), id="sgd-momentum"),
        pytest.param(partial(SGD, lr=0.1, momentum=0.9, foreach=True), id="sgd-foreach"),
        pytest.param(partial(SGD, lr=0.1), id="sgd"),
        pytest.param(Adafactor, id="adafactor"),
    ],
)
def test_state_and_update_take_the_predicted_bytes(make: Callable[..., Optimizer]) -> None:
    module = model()
    give_gradients(module)
    warmed = make([nn.Parameter(torch.ones(2))])
    give_gradients_to(warmed)
    warmed.step()
    optimizer = make(module.parameters())
    found = step_memory([optimizer])
    first = measured_memory(optimizer.step)
    second = measured_memory(optimizer.step)
    assert found.optimizer_bytes == first.end_bytes
    assert found.update_peak_bytes == max(first.peak_bytes - first.end_bytes, second.peak_bytes)


def give_gradients_to(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)


def test_clipping_counts_as_part_of_the_update() -> None:
    module = model()
    give_gradients(module)
    clip = partial(clip_norm, max_norm=1.0, data_parallel=None)
    clip(list(module.parameters()))
    measured = measured_memory(lambda: clip(list(module.parameters())))
    found = step_memory([SGD(module.parameters(), lr=0.1, foreach=False)], clip=clip)
    assert found.update_peak_bytes == measured.peak_bytes


def test_optimizers_do_on_the_planned_device_what_they_do_there() -> None:
    """AdamW updates all parameters at once on CUDA, and keeps its counters on the CPU."""
    with torch.device("meta"):
        module = model()
    found = step_memory([AdamW(module.parameters())], device_type="cuda")
    blocks = [-(-p.numel() * 4 // 512) * 512 for p in module.parameters()]
    assert found == StepMemory(optimizer_bytes=2 * sum(blocks), update_peak_bytes=sum(blocks))


def test_the_fused_update_takes_nothing() -> None:
    with torch.device("meta"):
        module = model()
    optimizer = AdamW(module.parameters(), fused=True)
    assert step_memory([optimizer], device_type="cuda").update_peak_bytes == 0


def test_frozen_parameters_have_no_state() -> None:
    module = model()
    module[0].requires_grad_(False)
    found = step_memory([AdamW(module.parameters(), fused=True)], accumulates=True)
    trained = [p for p in module.parameters() if p.requires_grad]
    num_bytes = sum(p.numel() * 4 for p in trained)
    assert found.gradient_bytes == num_bytes
    assert found.optimizer_bytes == 2 * num_bytes + 4 * len(trained)


def test_several_optimizers_add_up_their_state_and_not_their_updates() -> None:
    module = model()
    parts = [list(module[i].parameters()) for i in range(2)]
    alone = [step_memory([AdamW(part, foreach=True)]) for part in parts]
    both = step_memory([AdamW(part, foreach=True) for part in parts])
    assert both.optimizer_bytes == sum(m.optimizer_bytes for m in alone)
    assert both.update_peak_bytes == max(m.update_peak_bytes for m in alone)


def test_the_optimizer_is_left_as_it_was() -> None:
    module = model()
    optimizer = AdamW(module.parameters())
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user ran"))
    before = torch.random.get_rng_state()
    step_memory([optimizer])
    assert not optimizer.state
    assert scheduler.last_epoch == 0
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in module.parameters())


def test_an_optimizer_that_needs_data_is_named() -> None:
    class Choosy(SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.numpy()

    with pytest.raises(
        StepMemoryError, match=r"the memory that Choosy needs is not known: .*count_caller"
    ):
        step_memory([Choosy(model().parameters(), lr=0.1)])


def test_other_memory_is_passed_on() -> None:
    assert step_memory([], other_bytes=7) == StepMemory(other_bytes=7)


@pytest.mark.parametrize("fused", [True, False])
def test_the_allocations_of_two_updates_are_those_of_the_peak(fused: bool) -> None:
    with torch.device("meta"):
        module = model()
    found = step_memory([AdamW(module.parameters(), fused=fused)], device_type="cuda")
    first, second = found.update_allocations
    live = live_after((*first, *second))
    assert live[len(first)] == live[-1] == found.optimizer_bytes > 0
    assert max(live) - found.optimizer_bytes == found.update_peak_bytes
    # Two moments per parameter, and with a fused kernel a counter, which is on the device.
    num_left = sum(1 if n > 0 else -1 for n in first)
    assert num_left == (3 if fused else 2) * len(list(module.parameters()))


def test_equal_tiles_are_replayed_with_the_same_allocations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [(70, 300), (70, 300), (12,), (70, 300), (12,), (30, 300)]
    weights = [nn.Parameter(torch.ones(s, dtype=torch.bfloat16)) for s in shapes]
    monkeypatch.setattr(by_rows, "ELEMENTS_AT_ONCE", 32 * 300)
    optimizer = ours.AdamW(weights, states="int8", rounding="stochastic")
    num_updates = []
    update = ours.AdamW._update_tile
    monkeypatch.setattr(
        ours.AdamW,
        "_update_tile",
        lambda *arguments: num_updates.append(1) or update(*arguments),  # type: ignore[func-returns-value]
    )
    replayed = step_memory([optimizer]), len(num_updates)
    monkeypatch.setattr(step_memory_module._Update, "_replay", lambda _self, _key, run: run())
    each = step_memory([optimizer]), len(num_updates) - replayed[1]

    assert replayed[0] == each[0]
    assert replayed[0].update_allocations == each[0].update_allocations
    assert each[1] == 2 * (3 * 2 + 2 + 1)
    assert replayed[1] < each[1]
