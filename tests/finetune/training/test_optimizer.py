"""An optimizer is fused if PyTorch has the kernel and the run file does not choose an implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from thunder_memsave import ConfigError, optim
from thunder_memsave.finetune.run_file.config import (
    ModelConfig,
    OptimizerSpec,
    RunConfig,
    TrainConfig,
)
from thunder_memsave.finetune.training.optimizer import make_optimizer, place_steps
from thunder_memsave.measure.step_memory import step_memory


def made(name: str, *, device_type: str = "cuda", **arguments: Any) -> dict[str, Any]:
    spec = OptimizerSpec(class_path=f"torch.optim.{name}", init_args=arguments)
    weight = nn.Parameter(torch.ones(3))
    optimizer = make_optimizer(
        replace(RunConfig(), optimizer=spec), [weight], device_type=device_type
    )
    return optimizer.param_groups[0]


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_it_is_fused_where_nothing_else_is_said(name: str, device_type: str) -> None:
    assert made(name, device_type=device_type, lr=1e-3)["fused"] is True


@pytest.mark.parametrize("arguments", [{"foreach": True}, {"fused": False}, {"foreach": False}])
def test_what_the_run_file_says_stays(arguments: dict[str, bool]) -> None:
    group = made("AdamW", device_type="cuda", lr=1e-3, **arguments)
    assert not group["fused"]
    assert all(group[name] == value for name, value in arguments.items())


def test_optimizers_and_devices_without_such_a_kernel_stay_as_they_are() -> None:
    assert "fused" not in made("RMSprop", lr=1e-3)
    assert not made("AdamW", device_type="meta", lr=1e-3)["fused"]


def test_on_cuda_the_fused_update_of_a_plan_holds_nothing_more() -> None:
    weights = [nn.Parameter(torch.empty(1000, 1000, device="meta"))]
    optimizer = make_optimizer(RunConfig(), weights, device_type="cuda")
    memory = step_memory([optimizer], device_type="cuda")
    assert memory.update_peak_bytes < 2**12
    moments = 2 * 4 * 1000 * 1000
    assert moments < memory.optimizer_bytes < moments + 2**12


@pytest.mark.parametrize(
    ("setting", "device"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")]
)
def test_counts_of_updates_are_where_an_implementation_reads_them(
    setting: str, device: str
) -> None:
    weight = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.AdamW([weight])
    optimizer.param_groups[0][setting] = True
    for before in ("cpu", "meta"):
        optimizer.state[weight]["step"] = torch.tensor(2.0, device=before)
        if (before, device) == ("meta", "cpu"):
            continue  # there is no count to be moved
        place_steps(optimizer)
        assert optimizer.state[weight]["step"].device.type == device


def with_states(
    name: str,
    arguments: dict[str, Any] | None = None,
    trainable_dtype: Literal["float32", "bfloat16"] = "float32",
    **settings: Any,
) -> torch.optim.Optimizer:
    spec: Any = {"class_path": f"torch.optim.{name}", "init_args": arguments or {}, **settings}
    config = RunConfig(
        optimizer=spec,
        model=ModelConfig(trainable_dtype=trainable_dtype),
        train=TrainConfig(seed=7),
    )
    weight = nn.Parameter(torch.ones(3, 8, dtype=getattr(torch, trainable_dtype)))
    return make_optimizer(config, [weight], device_type="cpu")


@pytest.mark.parametrize(
    ("name", "arguments"), [("AdamW", {"lr": 1.0}), ("Adam", {}), ("SGD", {"momentum": 0.9})]
)
@pytest.mark.parametrize("states", ["bfloat16", "int8", "fp8"])
def test_states_in_fewer_bits_are_those_of_our_class(
    name: str, arguments: dict[str, Any], states: str
) -> None:
    made = with_states(name, arguments, states=states)
    assert type(made) is getattr(optim, name)
    assert made.param_groups[0].items() >= {"states": states, "seed": 7, **arguments}.items()


def test_float32_states_are_pytorchs_unless_weights_have_fewer_bits() -> None:
    assert type(with_states("AdamW", states="float32")) is torch.optim.AdamW
    assert type(with_states("AdamW", trainable_dtype="bfloat16")) is torch.optim.AdamW
    made = with_states("AdamW", trainable_dtype="bfloat16", states="float32")
    assert made.param_groups[0]["states"] == "float32"
    rounded = with_states("AdamW", trainable_dtype="bfloat16", rounding="stochastic")
    assert (
        rounded.param_groups[0].items()
        >= {
            "states": "bfloat16",
            "rounding": "stochastic",
        }.items()
    )


def test_what_cannot_have_such_states_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"which RMSprop does not have; Adam, AdamW and SGD do"):
        with_states("RMSprop", states="int8")
    with pytest.raises(ConfigError, match=r"optimizer\.rounding is 'stochastic', which Adagrad"):
        with_states("Adagrad", trainable_dtype="bfloat16", rounding="stochastic")
    with pytest.raises(ConfigError, match=r"SGD without momentum has no states"):
        with_states("SGD", states="int8")
    with pytest.raises(ConfigError, match=r"rounding is 'stochastic', but no trained weight is b"):
        with_states("AdamW", rounding="stochastic")
    with pytest.raises(ConfigError, match=r"fused"):
        with_states("AdamW", {"fused": True}, states="int8")
