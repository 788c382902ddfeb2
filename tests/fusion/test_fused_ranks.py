"""Two ranks with fusion have the gradients, the collectives and the predicted memory of two without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from harness import models
from harness.distributed import SOAK_HANG_S
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.fused_steps import MODELS
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.region import PREFIX
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 2


DECODERS = ("llama", "qwen2", "gpt2 with dropout", "lora with dropout")
RECOMPUTED = {"policy": "recompute_all"}


class Ran:
    """A model whose first step ran."""

    def __init__(
        self,
        sharding: str,
        *,
        fusion: bool,
        accumulates: bool = False,
        model: str = "llama",
        dtype: torch.dtype = torch.float32,
        memory: dict[str, Any] | None = None,
    ) -> None:
        self.fabric: Fabric = make_fabric(
            devices=NUM_RANKS,
            sharding=sharding,
            fusion=fusion,
            memory=memory or {},
            accumulate="accumulate_unsharded" if accumulates else "reduce_every",
            timeout="5min",
        )
        torch.manual_seed(0)
        module = MODELS[model]().to(dtype)
        self.model: Any
        self.model, optimizer = self.fabric.setup(module, torch.optim.SGD(module.parameters()))
        self.ids = models.token_batch(2, 16, seed=self.fabric.global_rank)
        if accumulates:
            with self.fabric.no_backward_sync(self.model):
                self.step()
        self.step()
        self.gradients: list[Tensor] = [
            p.grad.clone() for p in self.model.parameters() if p.grad is not None
        ]
        optimizer.zero_grad()

    @property
    def strategy(self) -> ThunderMemsaveStrategy:
        assert isinstance(self.fabric.strategy, ThunderMemsaveStrategy)
        return self.fabric.strategy

    @property
    def call(self) -> PlannedCall:
        planner = self.model._forward_module.planner
        assert isinstance(planner, MemoryPlanner)
        return planner.calls[-1]

    @property
    def predicted_bytes(self) -> int:
        assert self.strategy.plan is not None
        return self.strategy.plan.predicted_peak_bytes

    def step(self) -> None:
        output = self.model(input_ids=self.ids, labels=self.ids)
        self.fabric.backward(output.loss)

    def measured_bytes(self) -> int:
        """Return the peak of a later step, with what the plan counts as held."""
        held = sum(self.call.program.storages[s].nbytes for s in self.call.program.held)
        with letting_go():
            measured = measured_memory(self.step).peak_bytes
        self.model.zero_grad()
        return measured + held + self.call.memory.other_bytes

    def symbols(self) -> list[str]:
        return [s.op.symbol for s in self.call.program.steps]


def communicated(ran: Ran) -> list[str]:
    parts = ("gather", "scatter", "reduce", "wait", "all_to_all", "mm", "attention")
    return [name for name in ran.symbols() if any(part in name for part in parts)]


@on_fabric_rank
def check(sharding: str) -> None:
    for model, dtype in itertools.product(DECODERS, (torch.float32, torch.bfloat16)):
        unfused, fused = (Ran(sharding, fusion=f, model=model, dtype=dtype) for f in (False, True))
        assert_same_but_fused(unfused, fused)
        assert communicated(fused) == communicated(unfused)
        assert fused.predicted_bytes <= unfused.predicted_bytes
        smallest = Ran(sharding, fusion=True, model=model, dtype=dtype, memory=RECOMPUTED)
        assert_same_but_fused(unfused, smallest)
        for part in (0.8, 0.6):
            low, high = smallest.predicted_bytes, fused.predicted_bytes
            budget_bytes = int(low + part * (high - low))
            memory = {"policy": "plan", "budget": budget_bytes}
            planned = Ran(sharding, fusion=True, model=model, dtype=dtype, memory=memory)
            assert_same_but_fused(unfused, planned)
            assert planned.predicted_bytes <= budget_bytes


def assert_same_but_fused(unfused: Ran, fused: Ran) -> None:
    assert any(name.startswith(PREFIX) for name in fused.symbols())
    assert len(fused.gradients) == len(unfused.gradients) > 10
    assert all(map(torch.equal, fused.gradients, unfused.gradients))
    assert any("gather" in n or "reduce" in n for n in communicated(fused))
    assert fused.measured_bytes() == fused.predicted_bytes


@on_fabric_rank
def check_accumulated() -> None:
    unfused, fused = (Ran("zero2", fusion=f, accumulates=True) for f in (False, True))
    assert any(name.startswith(PREFIX) for name in fused.symbols())
    assert len(fused.gradients) == len(unfused.gradients) > 10
    assert all(map(torch.equal, fused.gradients, unfused.gradients))


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S)
def test_gradients_kept_unreduced_are_those_without_fusion() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    run_on_fabric_ranks(check_accumulated, NUM_RANKS, hang_s=SOAK_HANG_S)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S)
@pytest.mark.parametrize("sharding", ["zero3", "zero2"])
def test_two_ranks_keep_gradients_collectives_and_the_prediction(sharding: str) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    run_on_fabric_ranks(check, NUM_RANKS, sharding, hang_s=SOAK_HANG_S)
