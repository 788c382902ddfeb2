"""Where no plan fits otherwise, wide values run in tiles: within the budget, with the bytes that were predicted."""

from __future__ import annotations

from collections.abc import Iterator
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
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.region import PREFIX
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


def step(
    kind: Kind, budget_bytes: int, *, leave_out: tuple[str, ...] = (), fusion: bool = False
) -> Step:
    model, x = build(kind), torch.ones(1, NUM_ROWS, WIDTH).cumsum(1).sin()
    memory_planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=budget_bytes)
    config = CompileConfig(leave_out=leave_out, fusion=fusion)
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


def test_operators_fuse_within_a_tile() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    with pytest.raises(BudgetError) as refused:
        step("relu", 1, leave_out=("tile_rows",))
    assert refused.value.smallest_bytes is not None
    budget_bytes = refused.value.smallest_bytes // 2

    plain, fused = (step("relu", budget_bytes, fusion=f) for f in (False, True))

    assert not list(_functions_in_tiles(plain.call))
    assert list(_functions_in_tiles(fused.call))
    assert fused.measured_bytes == fused.call.profile.peak_bytes <= plain.call.profile.peak_bytes
    moved = [sum(s.op.moved_bytes for s in each.call.program.steps) for each in (plain, fused)]
    assert moved[1] < moved[0]
    for ours, theirs in zip(fused.gradients, plain.gradients, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def _functions_in_tiles(call: PlannedCall) -> Iterator[str]:
    """Yield the names of the regions of tiles."""
    for each in call.program.steps:
        if (program := row_tiles.program_of(each.op.symbol)) is not None:
            yield from (s.operator for s in program.steps if s.operator.startswith(PREFIX))


def test_tiles_are_of_one_size_where_rows_divide() -> None:
    row_bytes = row_tiles.TILE_BYTES // 200

    assert row_tiles.rows_per_tile(1024, row_bytes) == 128, "not 171 and less at last"
    assert row_tiles.rows_per_tile(1000, row_bytes) == 200 // 64 * 64 + 64
