"""A head in fp8 whose weight two ranks share has its loss in tiles, with the numbers of the plain composition."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.frontend.rewrites import linear_losses
from thunder_memsave.ops.families import tiled_loss

ROWS, LENGTH, WIDTH, CLASSES = 2, 180, 32, 64
TOKENS_OF_A_TILE = 130
FORWARD, BACKWARD = "linear_cross_entropy_in_fp8", "linear_cross_entropy_in_fp8_backward"


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.layer(self.embedding(ids))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def names(model: Any) -> list[str]:
    (found,) = model._forward_module.captures
    traces = (found.forward_traces[-1], found.backward_traces[-1])
    return [b.sym.name for t in traces for b in t.bound_symbols]


def stepped(recipe: str, mode: str, *, tied: bool, in_tiles: bool) -> dict[str, Tensor]:
    """Return losses, weights and the state of fp8 after three steps."""
    linear_losses.FEWEST_LOGITS = 1 if in_tiles else 1 << 60
    tiled_loss.TILE_BYTES = CLASSES * 6 * TOKENS_OF_A_TILE
    fabric = make_fabric(devices=2, sharding=mode, fp8={"recipe": recipe, "skip_modules": []})
    model = Model(tied=tied)
    made, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: dict[str, Tensor] = {}
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + fabric.global_rank)
        ids = torch.randint(CLASSES, (ROWS, LENGTH), generator=generator)
        loss = made(ids, ids.roll(1, 1).masked_fill(ids == 3, -100))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    ran = names(made)
    assert ((FORWARD in ran), (BACKWARD in ran)) == (in_tiles, in_tiles)
    state = {n: b.clone() for n, b in made.state_dict().items() if "fp8_scaling" in n}
    assert state or recipe != "delayed"
    return {**found, **state, **fabric.strategy.get_module_state_dict(made)}


@on_fabric_rank
def check_ranks() -> None:
    for recipe in ("delayed", "current", "block", "mxfp8"):
        for mode, tied in (("zero2", False), ("zero3", True)):
            ours = stepped(recipe, mode, tied=tied, in_tiles=True)
            theirs = stepped(recipe, mode, tied=tied, in_tiles=False)
            assert ours.keys() == theirs.keys()
            for name, value in ours.items():
                torch.testing.assert_close(
                    value, theirs[name], rtol=1e-5, atol=1e-6, msg=f"{recipe} {mode} {name}"
                )


def test_two_ranks_have_the_numbers_of_whole_logits() -> None:
    run_on_fabric_ranks(check_ranks, 2)
