"""Hybrid sharding on 2 x 2 ranks equals one process, through Fabric's API and in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.fabric import all_gathered, make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.sharding.rows import own_rows, take_rows
from thunder_memsave.sharding.same_on_all_ranks import RankMismatchError
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 4
HYBRID = {"mode": "hybrid", "size": 2}


class Odd(nn.Module):
    """Rows that two ranks cannot share evenly, a scalar, tied weights, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.down = nn.Linear(5, 4)
        self.again = nn.Linear(4, 5, bias=False)
        self.again.weight = self.up.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.down(torch.tanh(self.up(x)))) * self.scale


def build() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(seed: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def strategy_of(fabric: Fabric) -> ThunderMemsaveStrategy:
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    return fabric.strategy


def make(sharding: Any, **settings: Any) -> tuple[Fabric, Any, Any]:
    fabric = make_fabric(devices=NUM_RANKS, sharding=sharding, timeout="2min", **settings)
    model = build()
    return (fabric, *fabric.setup(model, adamw(model)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train(fabric: Fabric, model: Any, optimizer: Any, *, steps: range) -> None:
    for seed in steps:
        fabric.backward(model(batch(seed)[fabric.global_rank :: NUM_RANKS]).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
        optimizer.step()
        optimizer.zero_grad()


def reference(num_steps: int) -> Odd:
    """Train one process on all rows."""
    model = build()
    optimizer = adamw(model)
    for seed in range(num_steps):
        model(batch(seed)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_hybrid_keeps_fabrics_contract(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_hybrid, NUM_RANKS, tmp_path)


@on_fabric_rank
def check_hybrid(folder: Path) -> None:
    check_what_a_rank_holds()
    check_gradients_and_norms()
    check_checkpoints(folder)
    check_whole_weights()
    check_that_all_ranks_agree()
    check_meta()


def check_what_a_rank_holds() -> None:
    fabric, model, _ = make(HYBRID)
    dp = strategy_of(fabric).data_parallel
    assert dp is not None
    assert (dp.world_size, dp.num_ranks) == (2, 4)
    for p, whole in zip(model.parameters(), build().parameters(), strict=True):
        assert is_sharded(p) == (whole.dim() > 0)
        held = take_rows(whole.detach(), own_rows(whole.shape, dp)) if whole.dim() else whole
        assert torch.equal(p.data, held.detach())


def check_gradients_and_norms() -> None:
    """Each rank has rows of its own batch; the mean is over all four. Norms count every row once."""
    fabric, model, optimizer = make(HYBRID)
    dp = strategy_of(fabric).data_parallel
    assert dp is not None
    whole = build()
    fabric.backward(model(batch(0)[fabric.global_rank :: NUM_RANKS]).square().mean())
    whole(batch(0)).square().mean().backward()
    for order in (2.0, 1.0, float("inf")):
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.05, norm_type=order)
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.05, norm_type=order)
        )
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None
                continue
            grad = take_rows(q.grad, own_rows(q.shape, dp)) if is_sharded(p) else q.grad
            torch.testing.assert_close(p.grad, grad)
            assert replicas_are_equal(fabric, as_rows(p.grad))


def replicas_are_equal(fabric: Fabric, own: Tensor) -> bool:
    everywhere = all_gathered(fabric, own)
    return torch.equal(everywhere[:2], everywhere[2:])


def check_checkpoints(folder: Path) -> None:
    """A run saved under one sharding continues under the other bit-exactly."""
    expected = reference(4)
    for kind in ("sharded", "full"):
        for saved, loaded in ((HYBRID, "zero2"), ("zero2", HYBRID), (HYBRID, HYBRID)):
            path = folder / f"{kind}-{saved}-{loaded}"
            fabric, model, optimizer = make(saved, state_dict_type=kind)
            train(fabric, model, optimizer, steps=range(2))
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
            check_that_rows_are_stored_once(path)
            fabric, model, optimizer = make(loaded, state_dict_type=kind)
            state = {"model": model, "optimizer": optimizer, "step": 0}
            fabric.load(path, state)
            assert state["step"] == 2
            train(fabric, model, optimizer, steps=range(2, 4))
            check_weights(fabric, model, expected)


def check_that_rows_are_stored_once(path: Path) -> None:
    """Ranks 2 and 3 hold the rows of 0 and 1, and write nothing."""
    if path.is_dir() and "hybrid" in path.name.split("-")[1]:
        assert {f.name for f in path.glob("*.distcp") if f.stat().st_size} == {
            "__0_0.distcp",
            "__1_0.distcp",
        }


def check_weights(fabric: Fabric, model: Any, expected: nn.Module) -> None:
    whole = strategy_of(fabric).get_module_state_dict(model)
    for name, value in expected.state_dict().items():
        # AdamW divides by the root of small numbers: float32 rounding in gradients is amplified.
        torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-6)


def check_whole_weights() -> None:
    fabric, model, optimizer = make(HYBRID)
    with strategy_of(fabric).summon_full(model, writeback=True), torch.no_grad():
        assert torch.equal(model._original_module.up.weight, build().up.weight)
        model._original_module.up.weight.mul_(2)
    whole = strategy_of(fabric).get_module_state_dict(model)
    assert torch.equal(whole["up.weight"], 2 * build().up.weight)
    strategy_of(fabric).load_module_state_dict(model, reference(1).state_dict())
    train(fabric, model, optimizer, steps=range(1))


def check_that_all_ranks_agree() -> None:
    """Ranks that disagree are found even if they share neither rows nor a group."""
    fabric = make_fabric(devices=NUM_RANKS, sharding=HYBRID, timeout="2min")
    other = build()
    with torch.no_grad():
        other.up.weight.add_(float(fabric.global_rank == 2))
    whole = strategy_of(fabric).get_module_state_dict(fabric.setup(other))
    assert torch.equal(whole["up.weight"], build().up.weight)
    frozen = build()
    frozen.up.weight.requires_grad_(fabric.global_rank != 2)
    with pytest.raises(RankMismatchError, match=r"'up.weight' is trainable on rank 0 and frozen"):
        fabric.setup(frozen)
    compiled = build()
    if fabric.global_rank == 3:
        compiled.compile()
    error = ValueError if fabric.global_rank == 3 else OtherRankError
    with pytest.raises(error):
        fabric.setup(compiled)
    act: Callable[[], Any] = lambda: make_fabric(  # noqa: E731
        devices=NUM_RANKS, sharding={"mode": "hybrid", "size": 3}
    )
    with pytest.raises(ConfigError, match=r"groups of 3 ranks .* set sharding.size to one of 1, 2"):
        act()
    assert dist.get_world_size() == NUM_RANKS


def check_meta() -> None:
    """All replicas start with rank 0's values."""
    fabric = make_fabric(devices=NUM_RANKS, sharding=HYBRID, timeout="2min")
    torch.manual_seed(fabric.global_rank)
    with fabric.init_module(empty_init=True):
        original = nn.Linear(4, 5)
    model: Any = fabric.setup(original)
    assert replicas_are_equal(fabric, model.weight.data)
    assert model.weight.data[:2].abs().min() > 0
