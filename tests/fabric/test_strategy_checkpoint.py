"""`fabric.save`, `load` and `load_raw`, on two ranks and back on one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks, run_python
from thunder_memsave import ConfigError
from thunder_memsave.checkpoints import StateMismatchError

NUM_RANKS = 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(self.embedding(tokens))))


def setup(fabric: Fabric, *, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def train(fabric: Fabric, state: dict[str, Any], num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = state["model"](torch.arange(7)).square().mean()
        fabric.backward(loss)
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        state["step"] += 1
        losses.append(loss.item())
    return losses


def whole(fabric: Fabric, state: dict[str, Any]) -> dict[str, Tensor]:
    return fabric.strategy.get_module_state_dict(state["model"])


@pytest.mark.parametrize("state_dict_type", ["sharded", "full"])
def test_a_run_continues_bit_exactly(state_dict_type: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_on_fabric_ranks(check_run_continues, NUM_RANKS, state_dict_type, path)
    # The same checkpoint, on one rank.
    fabric = make_fabric()
    state = setup(fabric, seed=1)
    remainder = fabric.load(path, {"model": state["model"], "optimizer": state["optimizer"]})
    assert remainder.keys() == {"scheduler", "step"}
    expected = torch.load(tmp_path / "weights.pt")
    for name, value in whole(fabric, state).items():
        assert torch.equal(value, expected[name])
    losses = train(fabric, state, 1)
    assert losses == pytest.approx(torch.load(tmp_path / "losses.pt")[:1], rel=1e-6)
    if state_dict_type == "full":
        check_full_file(path)
    else:
        check_consolidation(path, expected)


@on_fabric_rank
def check_run_continues(state_dict_type: str, path: Path) -> None:
    fabric = make_fabric(devices=NUM_RANKS, state_dict_type=state_dict_type)
    state = setup(fabric)
    train(fabric, state, 2)
    fabric.save(path, state)
    weights = whole(fabric, state)
    if fabric.is_global_zero:
        torch.save(weights, path.parent / "weights.pt")
    expected_losses = train(fabric, state, 3)
    if fabric.is_global_zero:
        torch.save(expected_losses, path.parent / "losses.pt")
    expected = whole(fabric, state)

    resumed = setup(fabric, seed=1)
    assert fabric.load(path, resumed) == {}
    assert resumed["step"] == 2
    assert train(fabric, resumed, 3) == expected_losses
    for name, value in whole(fabric, resumed).items():
        assert torch.equal(value, expected[name])
    check_strictness(fabric, path)
    check_raw(fabric, path.parent / "weights.pt")


def check_strictness(fabric: Fabric, path: Path) -> None:
    state = setup(fabric, seed=1)
    with pytest.raises(KeyError, match="'epoch'"):
        fabric.load(path, {**state, "epoch": None})
    loaded = {**state, "epoch": None}
    fabric.load(path, loaded, strict=False)
    assert loaded["epoch"] is None
    assert loaded["step"] == 2
    other = fabric.setup(nn.Linear(3, 3, bias=False))
    with pytest.raises(StateMismatchError, match="weight"):
        fabric.load(path, {"model": other})


def check_raw(fabric: Fabric, path: Path) -> None:
    state, expected = setup(fabric, seed=1), torch.load(path)
    fabric.load_raw(path, state["model"])
    for name, value in whole(fabric, state).items():
        assert torch.equal(value, expected[name])
    with pytest.raises(ValueError, match="AdamW was to be loaded from a raw file"):
        fabric.load_raw(path, state["optimizer"])


def check_full_file(path: Path) -> None:
    checkpoint = torch.load(path)
    torch.manual_seed(3)
    model = Tied()
    model.load_state_dict(checkpoint["model"])  # a plain module, tied twins included
    assert checkpoint["step"] == 2
    assert checkpoint["optimizer"]["state"].keys() == {"embedding.weight"}


def check_consolidation(path: Path, expected: dict[str, Tensor]) -> None:
    run_python(["-m", "lightning.fabric.utilities.consolidate_checkpoint", path], num_forks=1)
    consolidated = torch.load(path.with_name(f"{path.name}.consolidated"))
    for name, value in expected.items():
        assert torch.equal(consolidated["model"][name], value)


def test_a_filter_selects_what_a_full_checkpoint_holds(tmp_path: Path) -> None:
    fabric = make_fabric(state_dict_type="full")
    state = setup(fabric)
    path = tmp_path / "checkpoint.pt"
    fabric.save(path, state, filter={"model": lambda name, value: "frozen" not in name})
    saved = torch.load(path)
    assert saved["model"].keys() == {"embedding.weight", "head.weight"}
    remainder = fabric.load(path, {"model": state["model"]}, strict=False)
    assert "step" in remainder


def test_a_filter_is_refused_for_shards(tmp_path: Path) -> None:
    fabric = make_fabric()
    with pytest.raises(ValueError, match="a sharded checkpoint is saved whole"):
        fabric.save(tmp_path / "c", setup(fabric), filter={"model": lambda name, value: True})


def test_storage_options_are_refused(tmp_path: Path) -> None:
    fabric = make_fabric()
    with pytest.raises(ConfigError, match=r"storage_options=.* is for CheckpointIO plugins"):
        fabric.strategy.save_checkpoint(tmp_path / "c", setup(fabric), storage_options={"a": 1})


def test_a_state_without_a_model_is_one_file(tmp_path: Path) -> None:
    fabric = make_fabric()
    state = setup(fabric)
    fabric.save(tmp_path / "weights.pt", state["model"].state_dict())
    loaded = torch.load(tmp_path / "weights.pt")
    assert loaded.keys() == state["model"].state_dict().keys()
    assert fabric.load(tmp_path / "weights.pt").keys() == loaded.keys()
    fabric.save(tmp_path / "c", {"model": state["model"]})
    with pytest.raises(ValueError, match="load got a state without a model"):
        fabric.load(tmp_path / "c")
    with pytest.raises(ValueError, match="save got a state without a model"):
        fabric.save(tmp_path / "d", {"optimizer": state["optimizer"]})


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    fabric = make_fabric(state_dict_type="full")
    state = setup(fabric)
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": Tied().state_dict(), "code": RunsCode()}, path)
    with pytest.raises(ValueError, match="could run code"):
        fabric.load(path, {"model": state["model"]})
    assert not Path("ran").exists()
    fabric.load(path, {"model": state["model"]}, weights_only=False)
    assert Path("ran").exists()


def test_optimizer_state_is_the_optimizers_own() -> None:
    fabric = make_fabric()
    state = setup(fabric)
    train(fabric, state, 1)
    saved = state["optimizer"].state_dict()
    state["optimizer"].load_state_dict(saved)
    assert saved["state"].keys() == {0}
