"""Updates with states in fewer bits: near PyTorch's, the same wherever a weight is cut, and of the predicted memory."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from harness.fabric import clipped_step, make_fabric
from harness.memory import measured_memory
from thunder_memsave import ConfigError
from thunder_memsave.measure.step_memory import step_memory
from thunder_memsave.optim import SGD, Adam, AdamW, by_rows
from thunder_memsave.optim.formats import FORMATS, Format

OURS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    (Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
]


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 96), nn.LayerNorm(40), nn.Embedding(50, 520))
    layers.scale = nn.Parameter(torch.tensor(1.0))
    layers.turned = nn.Parameter(torch.randn(30, 20).T)
    return layers.to(dtype)


def step(module: nn.Module, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize(("cls", "arguments"), OURS)
def test_float32_states_give_pytorchs_updates(
    cls: type[Optimizer], arguments: dict[str, Any]
) -> None:
    """But for the order of roundings: PyTorch fuses some of them."""
    ours, theirs = make(), make()
    used = cls(ours.parameters(), states="float32", **arguments)  # type: ignore[call-arg]
    known = getattr(torch.optim, cls.__name__)(theirs.parameters(), **arguments)
    for number in range(5):
        step(ours, used, number)
        step(theirs, known, number)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_the_same_however_many_rows_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, states: Format, dtype: torch.dtype
) -> None:
    rounding: Any = "stochastic" if dtype == torch.bfloat16 else "nearest"
    results = []
    for at_once in (1000, 2**30):
        monkeypatch.setattr(by_rows, "ELEMENTS_AT_ONCE", at_once)
        module = make(dtype)
        optimizer = AdamW(module.parameters(), states=states, rounding=rounding)
        for number in range(3):
            step(module, optimizer, number)
        kept = [value for values in optimizer.state.values() for value in values.values()]
        results.append([*module.parameters(), *kept])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("states", "dtype"),
    [
        ("float32", torch.bfloat16),
        ("bfloat16", torch.float32),
        ("int8", torch.bfloat16),
        ("fp8", torch.float32),
    ],
)
def test_states_and_updates_take_the_predicted_bytes(states: Format, dtype: torch.dtype) -> None:
    rounding: Any = "stochastic" if dtype == torch.bfloat16 else "nearest"
    warmed = make(dtype)
    step(warmed, AdamW(warmed.parameters(), states=states, rounding=rounding), 0)
    module = make(dtype)
    optimizer = AdamW(module.parameters(), states=states, rounding=rounding)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    found = step_memory([optimizer])
    first, second = measured_memory(optimizer.step), measured_memory(optimizer.step)
    assert found.optimizer_bytes == first.end_bytes
    assert found.update_peak_bytes == max(first.peak_bytes - first.end_bytes, second.peak_bytes)


@pytest.mark.parametrize(
    ("states", "expected"), [("float32", 8), ("bfloat16", 4), ("int8", 2), ("fp8", 2)]
)
def test_bytes_of_a_weight_of_whole_blocks(states: Format, expected: int) -> None:
    with torch.device("meta"):
        weight = nn.Parameter(torch.empty(4096, 4096))
    optimizer = AdamW([weight], states=states)
    found = step_memory([optimizer], device_type="cuda")
    scales = 0 if expected > 2 else 2 * 4 / 256
    assert found.optimizer_bytes == weight.numel() * (expected + scales)
    assert found.update_peak_bytes <= 6 * 4 * by_rows.ELEMENTS_AT_ONCE


def test_an_update_is_not_larger_where_the_second_moment_is_tiny() -> None:
    """One of 256 elements has a gradient 100,000 times the others': their own moments round to the least number."""
    weight = nn.Parameter(torch.zeros(1, 256))
    for states in ("int8", "fp8"):
        optimizer = AdamW([weight], lr=1.0, states=states, weight_decay=0.0)
        for _ in range(20):
            weight.data.zero_()
            weight.grad = torch.full((1, 256), 1e-4)
            weight.grad[0, 0] = 10.0
            optimizer.step()
        assert weight.detach().abs().max() < 1.5


def test_small_updates_of_bfloat16_weights_add_up_with_stochastic_rounding() -> None:
    moved = {}
    for rounding in get_args(by_rows.Rounding):
        weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        optimizer = AdamW([weight], lr=1e-4, weight_decay=0.0, states="float32", rounding=rounding)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[rounding] = (1 - weight.detach().float()).mean().item()
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(100 * 1e-4, rel=0.05)


def test_arguments_are_refused_by_name() -> None:
    weights = [nn.Parameter(torch.ones(2, 8))]
    for arguments, match in (
        ({"states": "int4"}, r"states is 'int4', but must be one of 'float32', 'bfloat16', 'int8'"),
        ({"rounding": "up"}, r"rounding is 'up', but must be one of"),
        ({"rounding": "stochastic"}, r"rounding is 'stochastic', but no trained weight is bfloat"),
        ({"lr": -1.0}, r"lr is -1.0, which is out of range"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\), which is out of range"),
    ):
        with pytest.raises(ConfigError, match=match):
            AdamW(weights, **arguments)
    with pytest.raises(ConfigError, match=r"states is 'fp4', but must be one of"):
        AdamW([{"params": weights, "states": "fp4"}])
    with pytest.raises(ConfigError, match=r"SGD without momentum has no states; set momentum"):
        SGD(weights)
    double = nn.Parameter(torch.ones(2, 8, dtype=torch.float64))
    double.grad = torch.ones_like(double)
    with pytest.raises(
        ConfigError, match=r"got a weight in torch.float64 .* use torch.optim.AdamW"
    ):
        AdamW([double]).step()


@pytest.mark.parametrize("states", FORMATS)
def test_loaded_states_keep_their_dtypes_and_go_on_bit_by_bit(states: Format) -> None:
    """PyTorch converts states to the parameter's dtype: scales would be rounded to bfloat16."""
    module = make(torch.bfloat16)
    optimizer = AdamW(module.parameters(), states=states, rounding="stochastic", seed=3)
    for number in range(3):
        step(module, optimizer, number)
    other = copy.deepcopy(module)
    loaded = AdamW(other.parameters(), lr=9.0, states=states, rounding="stochastic")
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in range(3, 6):
        step(module, optimizer, number)
        step(other, loaded, number)
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in optimizer.state[p].items():
            assert loaded.state[q][key].dtype == value.dtype
            assert torch.equal(loaded.state[q][key], value)


def test_states_of_pytorchs_adamw_load_where_they_are_float32() -> None:
    module = make()
    known = torch.optim.AdamW(module.parameters())
    step(module, known, 0)
    state = known.state_dict()
    AdamW(module.parameters(), states="float32").load_state_dict(copy.deepcopy(state))
    with pytest.raises(ValueError, match=r"parameter 0 has states in float32 in the file, int8"):
        AdamW(module.parameters()).load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("states", ["int8", "fp8"])
def test_the_peak_of_a_whole_step_is_the_planned_one_to_the_byte(states: Format) -> None:
    """Of a step whose largest moment is the update."""
    fabric = make_fabric(sharding="none", nonfinite_gradients="ignore")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 400), nn.Tanh(), nn.Linear(400, 40))
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), states=states))
    inputs = torch.randn(2, 300)

    whole_step = partial(clipped_step, fabric, model, optimizer, inputs)
    whole_step()
    kept = [value for values in optimizer.state.values() for value in values.values()]
    before = sum(t.numel() * t.element_size() for t in (*net.parameters(), *kept, inputs))
    plan = fabric.strategy.plan  # type: ignore[attr-defined]
    assert plan.predicted_peak_bytes == before + measured_memory(whole_step).peak_bytes
