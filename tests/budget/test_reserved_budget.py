"""A budget that limits what is reserved is kept by what the allocator is simulated to reserve."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness.fabric import make_fabric
from thunder_memsave.budget.allocator_settings import allocator_environment
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError, PlanError
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan
from thunder_memsave.settings.problems import ConfigError

M = 2**20
ROWS, WIDTH, NUM_BLOCKS = 4096, 128, 4  # 2 MiB for each activation


class Stack(nn.Module):
    """Blocks whose hidden activations are as large as a segment of the allocator is small."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.gelu(block(x))
        return x.square().mean()


def planned(memory: MemoryConfig, budget_bytes: int) -> PlannedCall:
    planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=budget_bytes)
    torch.manual_seed(0)
    CompiledModule(Stack(), planner=planner)(torch.ones(ROWS, WIDTH)).backward()
    (call,) = planner.calls
    return call


def plan_of(call: PlannedCall) -> Plan:
    assert call.plan is not None
    return call.plan


TENSORS, RESERVED = MemoryConfig(), MemoryConfig(limits="reserved", expandable_segments=False)


def test_what_is_reserved_stays_within_the_budget_at_the_price_of_recomputing() -> None:
    keep_all = planned(TENSORS, 1 << 40)
    budget_bytes = keep_all.profile.peak_bytes
    tensors, reserved = planned(TENSORS, budget_bytes), planned(RESERVED, budget_bytes)
    assert tensors.reserved_bytes(allocator_environment(RESERVED)) > budget_bytes
    assert reserved.reserved_bytes(allocator_environment(RESERVED)) <= budget_bytes
    assert plan_of(reserved).recompute_us > plan_of(tensors).recompute_us
    assert reserved.profile.peak_bytes < tensors.profile.peak_bytes
    assert plan_of(reserved).budget_bytes == budget_bytes


def test_the_smallest_budget_that_an_error_names_works() -> None:
    with pytest.raises(BudgetError) as caught:
        planned(RESERVED, 8 * M)
    smallest_bytes = caught.value.smallest_bytes
    assert smallest_bytes is not None
    call = planned(RESERVED, smallest_bytes)
    assert call.reserved_bytes(allocator_environment(RESERVED)) <= smallest_bytes


def test_an_allocator_that_is_not_simulated_has_no_such_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert planned(TENSORS, 1 << 40).profile.peak_bytes > 0
    message = r"memory\.limits is 'reserved', but the CUDA allocator's setting backend:cudaMallocAsync is not simulated"
    with pytest.raises(PlanError, match=message):
        planned(RESERVED, 1 << 40)


def test_nothing_is_simulated_where_tensors_are_limited() -> None:
    with patch.object(PlannedCall, "reserved_bytes", side_effect=AssertionError("simulated")):
        planned(TENSORS, 1 << 40)
        with pytest.raises(AssertionError, match="simulated"):
            planned(RESERVED, 1 << 40)


def test_the_cpu_reserves_nothing() -> None:
    fabric = make_fabric(memory={"budget": "1GiB", "limits": "reserved"})
    with pytest.raises(ConfigError, match=r"memory\.limits is 'reserved', but this is the CPU"):
        fabric.setup(nn.Linear(2, 2))(torch.ones(1, 2))
