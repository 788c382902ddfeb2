"""A step that offloads has the bits of one that keeps all, and takes the predicted bytes, whatever copies do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.copy_engines import hostile_copies
from harness.effort import little_effort
from harness.memory import measured_peak_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError, HostMemoryError
from thunder_memsave.ops.host_copies.engine import host_of
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.search.mixes import OffloadTerms

TERMS = OffloadTerms(
    rates=CopyRates(bytes_per_s=2e9, copy_us=5.0), host_bytes=2**30, least_bytes=2048
)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def plans_that_are_good_enough() -> Iterator[None]:
    with little_effort(0.2):
        yield


class Block(nn.Module):
    """A residual with dropout, a value that is written in place, and views of one storage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        hidden = nn.functional.silu(gate) * value
        hidden = hidden * 1.5
        hidden.add_(gate)
        return x + self.down(nn.functional.dropout(hidden, 0.1, self.training))


class Stack(nn.Module):
    def __init__(self, num_blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for block in self.blocks:
            x = block(x)
        return (x.square().mean(),)


class ResNet(nn.Module):
    """Convolutions with batch norms, whose buffers forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + nn.functional.relu(norm(convolution(x)))
        return (x.square().mean(),)


def stack() -> tuple[nn.Module, dict[str, Any]]:
    return Stack(), {"x": torch.randn(256, 8)}


def resnet() -> tuple[nn.Module, dict[str, Any]]:
    return ResNet(), {"x": torch.randn(4, 3, 12, 12)}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.randint(3, 16, (8, 32))
    dropout = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    return models.gpt2(2, vocab_size=16, **dropout), {"input_ids": ids, "labels": ids}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.randint(3, 16, (8, 32))
    model = models.llama(2, vocab_size=16, attention_dropout=0.1)
    return model, {"input_ids": ids, "labels": ids}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "stack": stack,
    "resnet": resnet,
    "gpt2": gpt2,
    "llama": llama,
}


@dataclass
class Run:
    """A model under one plan."""

    module: nn.Module
    batch: dict[str, Any]
    compiled: CompiledModule

    @property
    def call(self) -> PlannedCall:
        assert self.compiled.planner is not None
        return self.compiled.planner.calls[-1]

    @property
    def held_bytes(self) -> int:
        held = (self.call.program.storages[s].nbytes for s in self.call.program.held)
        return sum(held) + self.call.memory.other_bytes

    def step(self) -> list[Tensor]:
        """Return loss, gradients, buffers and the state of the generator after a step."""
        torch.manual_seed(7)
        loss = self.compiled(**self.batch)[0]
        loss.backward()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        buffers = [b.clone() for b in self.module.buffers()]
        self.module.zero_grad()
        return [loss.detach(), *gradients, *buffers, torch.get_rng_state()]

    def measured_bytes(self) -> int:
        def run() -> None:
            outputs = self.compiled(**self.batch)
            outputs[0].backward()

        measured = measured_peak_bytes(run)
        self.module.zero_grad()
        return measured


def made(
    name: str,
    budget_bytes: int | None,
    terms: OffloadTerms | None = TERMS,
    memory: StepMemory | None = None,
) -> Run:
    torch.manual_seed(0)
    module, batch = MODELS[name]()
    planner = MemoryPlanner(
        MemoryConfig(),
        device=device("cpu"),
        budget_bytes=budget_bytes,
        offload=terms,
        step_memory=lambda: memory or StepMemory(),
    )
    module.train()
    return Run(module, batch, CompiledModule(module, planner=planner))


def smallest_bytes(name: str, terms: OffloadTerms | None) -> int:
    with pytest.raises(BudgetError) as refused:
        made(name, 1, terms).step()
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def equal(ours: list[Tensor], reference: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize(
    "name", ["stack", "resnet", "llama", pytest.param("gpt2", marks=pytest.mark.soak)]
)
def test_at_half_of_what_keeping_all_takes_the_bits_are_those_of_keeping_all_and_the_bytes_those_predicted(
    name: str,
) -> None:
    free = made(name, None)
    reference = free.step()
    budget = (free.held_bytes + free.call.profile.peak_bytes) // 2
    run = made(name, budget)
    with hostile_copies() as (engine, buffers):
        assert equal(run.step(), reference)
        call = run.call
        assert call.plan is not None
        assert call.time is not None
        assert call.plan.actions.offloaded
        assert engine.num_begun["out"] == engine.num_begun["in"] > 0
        assert buffers.peak_bytes == call.time.host_peak_bytes
        assert buffers.count() == 0
    assert run.measured_bytes() + run.held_bytes == call.profile.peak_bytes <= budget


@pytest.fixture(scope="module")
def reference() -> list[Tensor]:
    return made("stack", None).step()


@pytest.fixture
def run() -> Run:
    return made("stack", 140_000)


def test_the_smallest_budget_is_far_below_that_of_recomputation_alone() -> None:
    free = made("stack", None)
    free.step()
    smallest = [smallest_bytes("stack", terms) - free.held_bytes for terms in (None, TERMS)]
    assert smallest[1] <= 0.72 * smallest[0]
    assert smallest_bytes("stack", TERMS) == smallest[1] + free.held_bytes, "asked again"


def test_a_graph_that_is_retained_keeps_its_buffers(run: Run) -> None:
    with hostile_copies() as (_, buffers):
        loss = run.compiled(**run.batch)[0]
        taken = buffers.count()
        loss.backward(retain_graph=True)
        once = [p.grad.clone() for p in run.module.parameters() if p.grad is not None]
        assert buffers.count() == taken > 0
        loss.backward()
        twice = [p.grad for p in run.module.parameters() if p.grad is not None]
        assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))
        assert buffers.count() == 0


def test_a_result_that_is_not_differentiated_gives_its_buffers_back(run: Run) -> None:
    with hostile_copies() as (_, buffers):
        loss = run.compiled(**run.batch)[0]
        assert buffers.count() > 0
        del loss
        assert buffers.count() == 0


@pytest.mark.parametrize("direction", ["out", "in"])
def test_an_exception_in_the_middle_gives_everything_back(
    run: Run, reference: list[Tensor], direction: str
) -> None:
    with hostile_copies() as (engine, buffers):
        run.step()  # makes the plan
        begin, most = engine.begin, 2 + engine.num_begun[direction]

        def raise_in_the_middle(*arguments: Any) -> Any:
            if arguments[2] == direction and engine.num_begun[direction] == most:
                raise RuntimeError("in the middle")
            return begin(*arguments)

        engine.begin = raise_in_the_middle  # type: ignore[assignment, method-assign]
        with pytest.raises(RuntimeError, match="in the middle"):
            run.step()
        engine.begin = begin  # type: ignore[method-assign]
        gc.collect()
        assert buffers.count() == 0
        run.module.zero_grad()
        assert equal(run.step(), reference)


def test_without_gradients_nothing_is_copied(run: Run, reference: list[Tensor]) -> None:
    with hostile_copies() as (engine, buffers):
        loss = run.compiled(**run.batch)[0]
        begun = dict(engine.num_begun)
        with torch.no_grad():
            run.compiled(**run.batch)
        assert engine.num_begun == begun
        loss.backward()
        run.module.zero_grad()
        assert equal(run.step(), reference)
        assert buffers.count() == 0


def test_more_calls_in_flight_than_the_host_has_room_for_are_refused(run: Run) -> None:
    with hostile_copies() as (_, buffers):
        run.step()
        assert run.call.time is not None
        buffers.limit_bytes = buffers.made_bytes = run.call.time.host_peak_bytes
        first = run.compiled(**run.batch)[0]
        with pytest.raises(HostMemoryError, match=r"memory.host_budget is [0-9,]+, which is plan"):
            run.compiled(**run.batch)
        first.backward()
        run.compiled(**run.batch)[0].backward()


def test_the_engine_of_the_cpu_copies_in_threads_of_its_own(
    run: Run, reference: list[Tensor]
) -> None:
    assert equal(run.step(), reference)
    assert equal(run.step(), reference)
    assert host_of(CPU).buffers.count() == 0
    assert host_of(CPU).buffers.made_bytes > 0
