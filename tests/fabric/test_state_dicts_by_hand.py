"""Scripts that put `state_dict()`s into a checkpoint and take them out, as with Lightning's `ddp`, on shards too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.sharding.row_errors import ShardedParameterError

NUM_RANKS = 2


class Odd(nn.Sequential):
    """Rows that two ranks cannot share evenly, and one row that only rank 0 has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def batch(seed: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


def step(model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@on_fabric_rank
def check_rows(path: Path) -> None:
    fabric = make_fabric(devices=NUM_RANKS, sharding="zero3")
    reference = Odd()
    expected = adamw(reference)
    step(reference, expected, batch(0))
    model = Odd()
    model, optimizer = fabric.setup(model, adamw(model))
    step(model, optimizer, batch(0)[fabric.global_rank :: NUM_RANKS])
    with pytest.raises(ShardedParameterError, match=r"Refused to write rows of '0\.weight'"):
        torch.save(optimizer.state_dict(), path)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    fabric.save(path, state)
    fabric.barrier()
    loaded = torch.load(path)
    torch.testing.assert_close(loaded["model"], dict(reference.state_dict()))
    torch.testing.assert_close(loaded["optimizer"], expected.state_dict())
    resumed = Odd()
    resumed, other = fabric.setup(resumed, adamw(resumed))
    resumed.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimizer"])
    for trained in ((model, optimizer), (resumed, other)):
        step(*trained, batch(1)[fabric.global_rank :: NUM_RANKS])
    assert all(map(torch.equal, *(m.state_dict().values() for m in (model, resumed))))
    moments = copy.deepcopy(optimizer.state_dict())
    for values, there in zip(moments["state"].values(), other.state.values(), strict=True):
        assert torch.equal(values["exp_avg"], there["exp_avg"])
    other.load_state_dict(moments)  # rows are taken too
    assert type(other.state[resumed.module[0].weight]["exp_avg"]) is Tensor


def test_shards_are_gathered_into_a_file_and_taken_out(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_rows, NUM_RANKS, tmp_path / "state.pt")
