"""Where the tile of a loss has no room, it gets fewer tokens, and the step takes the predicted bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.memory import measured_peak_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError
from thunder_memsave.planner.devices import device

NUM_TOKENS, WIDTH, CLASSES = 512, 32, 8192
LOGITS_BYTES = NUM_TOKENS * CLASSES * 4


class Model(nn.Module):
    """A wide layer whose results backward reads, and a head with its loss."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False).requires_grad_(is_trained)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.down(torch.tanh(self.up(x)))), targets)


@dataclass
class Step:
    call: PlannedCall
    gradients: list[Tensor | None]
    measured_bytes: int
    """Parameters and batch included."""

    @property
    def tile_rows(self) -> int:
        """Tokens of the loss's tile."""
        (rows,) = {b.args[-3] for b in self.call.joint.bound_symbols if _is_loss(b.sym.name)}
        return int(rows)


def _is_loss(name: str) -> bool:
    return name.startswith("linear_cross_entropy") and not name.endswith("_backward")


def step(budget_bytes: int, *, is_trained: bool = False) -> Step:
    model = Model(is_trained=is_trained)
    x = torch.ones(NUM_TOKENS, WIDTH).cumsum(0).sin()
    targets = torch.arange(NUM_TOKENS) * 7 % CLASSES
    planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=budget_bytes)
    compiled = CompiledModule(model, planner=planner)
    compiled(x, targets).backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    measured = measured_peak_bytes(lambda: compiled(x, targets).backward())
    held = sum(t.nbytes for t in (*model.parameters(), x, targets))
    return Step(planner.calls[-1], gradients, measured + held)


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_step_with_smaller_tiles_takes_the_predicted_bytes(is_trained: bool) -> None:
    free = step(2**40, is_trained=is_trained)
    with pytest.raises(BudgetError) as refused:
        step(1, is_trained=is_trained)
    smallest_bytes = refused.value.smallest_bytes
    assert smallest_bytes is not None

    least = step(smallest_bytes, is_trained=is_trained)

    assert free.tile_rows == NUM_TOKENS
    assert least.tile_rows == NUM_TOKENS // 16
    assert least.call.profile.peak_bytes <= smallest_bytes
    assert smallest_bytes < free.call.profile.peak_bytes - LOGITS_BYTES // 4 * 3
    assert least.measured_bytes == least.call.profile.peak_bytes
    for ours, whole in zip(least.gradients, free.gradients, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-7)


def test_tiles_are_as_large_as_there_is_room_for() -> None:
    free = step(2**40)
    enough_bytes = free.call.profile.peak_bytes
    tight = step(enough_bytes - LOGITS_BYTES // 2)

    assert step(enough_bytes).tile_rows == NUM_TOKENS
    assert tight.tile_rows == NUM_TOKENS // 4
    assert tight.call.plan is not None
    assert tight.call.plan.recompute_us == 0.0, "it costs less than to recompute"
    assert tight.measured_bytes == tight.call.profile.peak_bytes
