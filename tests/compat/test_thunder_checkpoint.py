"""Thunder redraws the dropout of a `torch.utils.checkpoint` region in backward, which gives wrong gradients.

That is why such regions are ours (`strategy/frontend/checkpoints.py`, `strategy/passes/checkpoint_regions.py`): random
numbers are drawn once, and backward replays them. Found in Thunder 0.2.6: its rule clones `uniform` like any other
operation.
"""

from __future__ import annotations

import pytest
import thunder
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from harness.fabric import make_fabric

HEALED = (
    "Thunder is healed: delete this file, and the reason in `inline_checkpoints` (strategy/frontend/checkpoints.py); "
    "look whether its rule for regions could be used instead."
)
WIDTH = 256


class Region(nn.Module):
    """Its output is zero exactly where its weight has no gradient, if backward has forward's mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._dropped, x, use_reentrant=False)

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x * self.weight, 0.5).square()


def masks(region: nn.Module, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masks of forward and of backward."""
    dropped = region(torch.ones(WIDTH))
    dropped.sum().backward()
    assert weight.grad is not None
    return dropped != 0, weight.grad != 0


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_canary_thunder_has_another_mask_in_backward() -> None:
    region = Region()
    forward, backward = masks(thunder.jit(region), region.weight)
    assert 0 < int(forward.sum()) < WIDTH
    assert not torch.equal(forward, backward), HEALED


def test_ours_has_the_mask_of_forward() -> None:
    region = Region()
    ours = make_fabric().setup(region)
    forward, backward = masks(ours, region.weight)
    assert 0 < int(forward.sum()) < WIDTH
    assert torch.equal(forward, backward)
