"""Optimizer state by name: complete, unrounded, and free of anything that could run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from thunder_memsave.checkpoints import StateMismatchError, load_checkpoint, save_checkpoint
from thunder_memsave.checkpoints.optimizer_state import (
    named_parameters_of,
    named_state_of,
    rekey,
    set_optimizer_state,
)


class Float32Momentum(torch.optim.Optimizer):
    """Keeps float32 momentum for parameters of any dtype, a count, and a tensor as setting."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "temperature": torch.tensor(2.0)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    before = state.get("momentum", torch.zeros(p.shape))
                    state["momentum"] = before + p.grad.float() / 3
                    p.data.add_(state["momentum"].to(p.dtype), alpha=-group["lr"])


def trained(lr: float = 0.1) -> tuple[nn.Module, Float32Momentum]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = Float32Momentum(net.parameters(), lr=lr)
    net.weight.grad = torch.full((2, 3), 0.7, dtype=torch.bfloat16)
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_float32_state_of_a_bfloat16_parameter_is_not_rounded(tmp_path: Path, format: Any) -> None:
    net, optimizer = trained()
    optimizer.param_groups[0]["temperature"].fill_(5.0)
    state = {"net": net, "opt": optimizer}
    save_checkpoint(tmp_path / "c", state, state_dict_type=format, data_parallel=None)
    other, restored = trained(lr=0.7)
    temperature = restored.param_groups[0]["temperature"]
    load_checkpoint(tmp_path / "c", {"net": other, "opt": restored}, data_parallel=None)
    momentum = restored.state[other.get_parameter("weight")]["momentum"]
    expected = optimizer.state[net.get_parameter("weight")]["momentum"]
    assert momentum.dtype is torch.float32
    assert torch.equal(momentum, expected)
    assert not torch.equal(expected, expected.bfloat16().float())
    assert restored.state[other.get_parameter("weight")]["count"] == 1
    assert other.get_parameter("bias") not in restored.state
    assert restored.param_groups[0]["lr"] == 0.1
    assert restored.param_groups[0]["temperature"] is temperature
    assert temperature == 5.0


def test_positions_become_names_in_the_optimizers_order() -> None:
    _, optimizer = trained()
    named = rekey(optimizer.state_dict(), optimizer, ["weight", "bias"])
    assert named.param_groups[0]["params"] == ["weight", "bias"]
    assert set(named.state) == {"weight"}
    assert rekey(named.as_dict(), optimizer, ["weight", "bias"]) == named
    with pytest.raises(ValueError, match=r"has 2 parameters without names, this one has 1"):
        rekey(optimizer.state_dict(), optimizer, ["weight"])
    with pytest.raises(ValueError, match=r"stored for the Float32Momentum has no 'state'"):
        rekey({"weight": 1}, optimizer, ["weight"])


def test_settings_that_are_no_plain_values_are_refused() -> None:
    net, optimizer = trained()
    parameters = named_parameters_of(optimizer, [net])
    optimizer.param_groups[0]["schedule"] = {1: 2}
    with pytest.raises(ValueError, match=r"setting 'schedule' is a dict; a checkpoint holds num"):
        named_state_of(optimizer, parameters)


def test_an_optimizer_without_its_module_has_no_names() -> None:
    _, optimizer = trained()
    with pytest.raises(ValueError, match=r"trains parameters that no module in the checkpoint's"):
        named_parameters_of(optimizer, [nn.Linear(1, 1)])


def test_a_changed_trainable_set_is_refused_by_name(tmp_path: Path) -> None:
    net, optimizer = trained()
    state = {"net": net, "opt": optimizer}
    for format in ("sharded", "full"):
        path = tmp_path / format
        save_checkpoint(path, state, state_dict_type=format, data_parallel=None)
        frozen = Float32Momentum([net.get_parameter("weight")])
        match = r"bias: in parameter group 0 of the file, not of the optimizer"
        with pytest.raises(StateMismatchError, match=match):
            load_checkpoint(path, {"net": net, "opt": frozen}, data_parallel=None)
        assert not frozen.state


def test_hooks_on_loading_run() -> None:
    net, optimizer = trained()
    seen: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("before"))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append("after"))
    parameters = named_parameters_of(optimizer, [net])
    set_optimizer_state(optimizer, parameters, named_state_of(optimizer, parameters))
    assert seen == ["before", "after"]


def test_a_directory_whose_save_was_interrupted_is_named(tmp_path: Path) -> None:
    net, _ = trained()
    path = tmp_path / "c"
    save_checkpoint(path, {"net": net}, state_dict_type="sharded", data_parallel=None)
    metadata = path / ".metadata"
    for damage in (metadata.read_bytes()[:20], b"", None):
        if damage is None:
            metadata.unlink()
        else:
            metadata.write_bytes(damage)
        with pytest.raises(ValueError, match=r"c has no readable .metadata file, so its save was"):
            load_checkpoint(path, {"net": net}, data_parallel=None)
