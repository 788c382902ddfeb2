"""Where no plan fits otherwise, wide values run in tiles: within the budget, with the bytes that were predicted."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from harness.memory import measured_peak_bytes
from harness.row_mlps import WIDTH, Kind, Rows, build
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.errors import BudgetError
from thunder_memsave.ops import row_tiles
from thunder_memsave.planner.devices import device

NUM_ROWS = 1024
UNLIMITED = 2**40


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tiles, "LEAST_ROWS", 64)
    monkeypatch.setattr(row_tiles, "TILE_BYTES", 2**16)


@dataclass
class Step:
    """A model after one step under a budget."""

    call: PlannedCall
    gradients: list[Tensor | None]
    measured_bytes: int
    """Parameters and batch included."""


def step(kind: Kind, budget_bytes: int, *, leave_out: tuple[str, ...] = ()) -> Step:
    model, x = build(kind), torch.ones(1, NUM_ROWS, WIDTH).cumsum(1).sin()
    memory_planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=budget_bytes)
    config = CompileConfig(leave_out=leave_out)
    compiled = CompiledModule(model, planner=memory_planner, config=config)
    compiled(x)[0].backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    measured = measured_peak_bytes(lambda: compiled(x)[0].backward())
    return Step(memory_planner.calls[-1], gradients, measured + _held(model, x))


def _held(model: Rows, x: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), x))


@pytest.mark.parametrize("kind", ["gated", "adapters"])
def test_a_step_in_tiles_takes_the_predicted_bytes(kind: Kind) -> None:
    free = step(kind, UNLIMITED)
    with pytest.raises(BudgetError) as refused:
        step(kind, 1, leave_out=("tile_rows",))
    smallest_bytes = refused.value.smallest_bytes
    assert smallest_bytes is not None

    fits = step(kind, smallest_bytes)
    tiled = step(kind, smallest_bytes // 2)

    assert not free.call.is_tiled
    assert not fits.call.is_tiled, "a plan without tiles fits"
    assert tiled.call.is_tiled
    assert tiled.call.profile.peak_bytes <= smallest_bytes // 2
    assert tiled.measured_bytes == tiled.call.profile.peak_bytes
    for ours, whole in zip(tiled.gradients, free.gradients, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=2e-6)


def test_what_tiles_need_at_least_is_named() -> None:
    with pytest.raises(BudgetError) as whole:
        step("gated", 1, leave_out=("tile_rows",))
    with pytest.raises(BudgetError) as tiled:
        step("gated", 1)
    assert whole.value.smallest_bytes is not None
    assert tiled.value.smallest_bytes is not None
    assert tiled.value.smallest_bytes < whole.value.smallest_bytes
    assert step("gated", tiled.value.smallest_bytes).call.is_tiled
