"""A loss outside of the call is priced; one inside, or results that are no logits, are not spoken of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.ops.families.tiled_loss import TILE_BYTES
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory
from thunder_memsave.planner.report.outside_loss import loss_outside

TOKENS, WIDTH, CLASSES = 32, 8, 1_000_000
LOGITS_BYTES = 4 * TOKENS * CLASSES


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)


class Logits(Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)).float().unsqueeze(0)


class Loss(Head):
    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layer(x)), torch.zeros(TOKENS, dtype=torch.int64))


class Hidden(Head):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)).repeat(1, CLASSES // WIDTH)


def told(model: nn.Module, *, between_bytes: int = 0) -> list[str]:
    memory = StepMemory(between_bytes=between_bytes)
    planner = MemoryPlanner(
        MemoryConfig(), device=device("cpu"), budget_bytes=None, step_memory=lambda: memory
    )
    CompiledModule(model, planner=planner)(torch.randn(TOKENS, WIDTH))
    return loss_outside(planner.calls[-1].graph, memory, tile_bytes=TILE_BYTES)


@pytest.mark.parametrize("between_bytes", [0, 3 * LOGITS_BYTES])
def test_logits_that_a_loss_outside_reads_are_priced(between_bytes: int) -> None:
    (sentence,) = told(Logits(), between_bytes=between_bytes)
    saved_bytes = LOGITS_BYTES + max(LOGITS_BYTES, between_bytes) - TILE_BYTES
    assert "the call returns 122.07 MiB of a linear layer's results" in sentence
    assert f"about {saved_bytes / 2**20:.2f} MiB less between forward and backward" in sentence


@pytest.mark.parametrize("model", [Loss, Hidden])
def test_nothing_is_said_of_other_results(model: type[nn.Module]) -> None:
    assert told(model()) == []
