"""Two ranks run one plan: with the gradients of keeping all, within the budget, and with the predicted memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness import models
from harness.effort import little_effort
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.errors import BudgetError, PlanError
from thunder_memsave.passes.overlap.room import NO_ROOM
from thunder_memsave.planner.graph import Plan
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 2


@dataclass(frozen=True, slots=True)
class Planned:
    """A model after its first planned step."""

    fabric: Fabric
    model: Any
    optimizer: Any
    gradients: list[Tensor]

    @property
    def strategy(self) -> ThunderMemsaveStrategy:
        assert isinstance(self.fabric.strategy, ThunderMemsaveStrategy)
        return self.fabric.strategy

    @property
    def plan(self) -> Plan:
        assert self.strategy.plan is not None
        return self.strategy.plan

    def forward_and_backward(self, ids: Tensor) -> None:
        output = self.model(input_ids=ids, labels=ids)
        self.fabric.backward(output.loss)

    def step(self, ids: Tensor) -> None:
        output = self.model(input_ids=ids, labels=ids)
        self.fabric.backward(output.loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
        self.optimizer.step()


def batch(rank: int, length: int = 32) -> Tensor:
    return models.token_batch(4, length, seed=rank)


def planned(
    sharding: str,
    memory: dict[str, Any],
    num_layers: int = 3,
    *,
    prefetch: int | str = "auto",
    lengths: tuple[int, int] = (32, 32),
) -> Planned:
    fabric = make_fabric(
        devices=NUM_RANKS, sharding=sharding, memory=memory, prefetch=prefetch, timeout="2min"
    )
    torch.manual_seed(0)
    module = models.llama(num_layers)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    made = Planned(fabric, model, optimizer, [])
    made.forward_and_backward(batch(fabric.global_rank, lengths[fabric.global_rank]))
    made.gradients.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    return made


@on_fabric_rank
def check_plans() -> None:
    with little_effort():
        check_budgets("zero3", num_layers=2)
        check_budgets("zero2", num_layers=1)
        check_budgets("none", num_layers=1)
        check_room()


def check_budgets(sharding: str, num_layers: int) -> None:
    whole = planned(sharding, {"policy": "keep_all"}, num_layers)
    check_memory(whole)
    tight = planned_at_the_floor(sharding, num_layers)
    check_budget(tight, whole)
    check_other_lengths(tight)
    if sharding == "zero3":
        budget_bytes = whole.plan.predicted_peak_bytes * 8 // 10
        check_budget(planned(sharding, {"budget": budget_bytes}, num_layers), whole)


def check_budget(ours: Planned, whole: Planned) -> None:
    assert ours.plan.budget_bytes is not None
    assert ours.plan.saved_bytes < whole.plan.saved_bytes
    assert len(set(map(str, gathered(ours.plan.actions)))) == 1
    assert len(ours.gradients) == len(whole.gradients) > 10
    for measured, expected in zip(ours.gradients, whole.gradients, strict=True):
        assert torch.equal(measured, expected)
    assert ours.plan.predicted_peak_bytes <= ours.plan.budget_bytes
    assert check_memory(ours) <= ours.plan.budget_bytes


def planned_at_the_floor(sharding: str, num_layers: int) -> Planned:
    """Plan for the budget that the error names, which includes memory of later passes, such as prefetched gathers."""
    smallest_bytes = check_error(sharding, num_layers)
    return planned(sharding, {"budget": smallest_bytes}, num_layers)


def check_room() -> None:
    """Check overlap with a budget a little above the peak of the longer batch, rank 1's, without overlap."""
    lengths = (4, 8)
    at_once = planned("zero3", {}, prefetch=0, lengths=lengths)
    shorter, longer = gathered(at_once.plan.predicted_peak_bytes)
    assert shorter < longer
    memory = {"budget": longer * 105 // 100}
    limited = planned("zero3", memory, prefetch=10**6, lengths=lengths)
    assert limited.plan.actions == at_once.plan.actions
    check_order(at_once, limited)
    for measured, expected in zip(limited.gradients, at_once.gradients, strict=True):
        assert torch.equal(measured, expected)
    assert limited.plan.predicted_peak_bytes <= memory["budget"]
    assert check_memory(limited, lengths[dist.get_rank()]) <= memory["budget"]
    check_evaluation(limited, memory["budget"])


def check_order(at_once: Planned, limited: Planned) -> None:
    """Check that some collectives overlap computation, and that all ranks start the same ones in the same order."""
    (run,) = planner(limited)._agreed.values()
    assert run.room not in (None, NO_ROOM)
    ours, theirs = (
        [s.op.results for s in planner(step).calls[0].program.steps] for step in (limited, at_once)
    )
    assert ours != theirs
    assert len(set(map(str, gathered(ours)))) == 1


def check_evaluation(step: Planned, budget_bytes: int) -> None:
    """Check the evaluation of batches of two lengths."""
    step.model.eval()
    ids = batch(step.fabric.global_rank, 8 - 4 * step.fabric.global_rank)
    with torch.no_grad():
        loss = step.model(input_ids=ids, labels=ids).loss
    call = planner(step).calls[-1]
    assert call.plan is None
    assert loss.isfinite()
    assert call.profile.peak_bytes <= budget_bytes
    names = [s.op.results for s in call.program.steps]
    assert len(set(map(str, gathered(names)))) == 1


def check_memory(step: Planned, length: int = 32) -> int:
    """Check the predicted peak of this rank; return the measured one, with all bytes that were live before."""
    ids = batch(step.fabric.global_rank, length)
    existing = existing_bytes(step, ids)
    with letting_go():
        step.step(ids)
        step.optimizer.zero_grad()
        measured = existing + measured_memory(lambda: step.step(ids)).peak_bytes
    step.optimizer.zero_grad()
    predicted = step.plan.predicted_peak_bytes
    assert measured == pytest.approx(predicted, rel=0.01)
    return measured


def existing_bytes(step: Planned, ids: Tensor) -> int:
    """Return the bytes of parameters, buffers, optimizer state and the batch."""
    states = [v for state in step.optimizer.state.values() for v in state.values()]
    tensors = [*step.model.parameters(), *step.model.buffers(), *states, ids]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if isinstance(t, Tensor)
    }
    return sum(storages.values())


def check_error(sharding: str, num_layers: int) -> int:
    """Check that rank 0's error ends all ranks; return the smallest budget."""
    with pytest.raises((BudgetError, OtherRankError)) as caught:
        planned(sharding, {"budget": 1000}, num_layers)
    text = "the budget is 1,000 bytes, and no plan was found that stays within it"
    assert text in str(caught.value)
    if dist.get_rank() > 0:
        assert type(caught.value) is OtherRankError
        assert "rank 0 failed, so this rank stops too: BudgetError" in str(caught.value)
    return smallest_of(caught.value)


def smallest_of(error: BaseException) -> int:
    """Return the smallest budget that rank 0's error names."""
    smallest = gathered(getattr(error, "smallest_bytes", None))[0]
    assert isinstance(smallest, int)
    return smallest


def check_other_lengths(step: Planned) -> None:
    """Check that rank 1 alone compiles again, and that the others do not wait for it to plan."""
    num_calls = len(planner(step).calls)
    for length in (20,):
        ids = batch(step.fabric.global_rank, length if step.fabric.global_rank else 32)
        step.forward_and_backward(ids)
    step.optimizer.zero_grad()
    calls = planner(step).calls[num_calls:]
    assert len(calls) == step.fabric.global_rank
    assert all(call.plan and call.plan.actions == step.plan.actions for call in calls)


def planner(step: Planned) -> MemoryPlanner:
    found = step.model._forward_module.planner
    assert isinstance(found, MemoryPlanner)
    return found


def gathered(value: object) -> list[Any]:
    values: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(values, value)
    return values


class Branching(nn.Module):
    """Runs different operations on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y.tanh() if dist.get_rank() else y.sin().cos()).sum()


@on_fabric_rank
def check_other_operations() -> None:
    fabric = make_fabric(devices=NUM_RANKS, sharding="zero3", timeout="2min")
    torch.manual_seed(0)
    model = fabric.setup(Branching())
    expected, text = (
        (PlanError, r"this rank runs other operations than rank 0.* run the same code on every")
        if fabric.global_rank
        else (OtherRankError, r"rank 1 failed, so this rank stops too: PlanError: this rank runs")
    )
    with pytest.raises(expected, match=text):
        model(torch.ones(2, 8))


def test_plans_hold_on_all_ranks() -> None:
    run_on_fabric_ranks(check_plans, NUM_RANKS, hang_s=900)


def test_ranks_that_run_other_operations_stop_all() -> None:
    run_on_fabric_ranks(check_other_operations, NUM_RANKS)
