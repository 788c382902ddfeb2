"""`Fp8Monitor` reports the scaling of a run's fp8 tensors."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.callbacks import CallbackStates, Fp8Monitor
from thunder_memsave.settings.problems import ConfigError

E4M3_MAX = 448.0
FP8 = {"backend": "torch", "amax_history_len": 4, "skip_modules": ()}


def two_linears() -> nn.Sequential:
    """Return two linears with weights of ones; the first is frozen."""
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[0].weight.requires_grad_(False)
    return model


class Loop:
    """Steps of `two_linears`, whose inputs all have the same value."""

    def __init__(self, monitor: Fp8Monitor, *, start: int = 0, **fp8: Any) -> None:
        self.monitor, self.step = monitor, start
        self.fabric = make_fabric(fp8={**FP8, **fp8})
        model = two_linears()
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        monitor.on_train_start(fabric=self.fabric, step=start)

    def __call__(self, *values: float) -> dict[str, Any]:
        """Take one step with a micro-batch per value, and return its metrics."""
        for value in values:
            x = torch.full((16, 16), value, requires_grad=True)
            self.fabric.backward(self.model(x).sum())
        self.monitor.on_before_optimizer_step(fabric=self.fabric, model=self.model)
        self.optimizer.step()
        self.step += 1
        metrics: dict[str, Any] = {}
        self.monitor.on_train_batch_end(fabric=self.fabric, step=self.step, metrics=metrics)
        return metrics


def test_every_tensor_whose_scale_changes_is_told_of() -> None:
    loop = Loop(Fp8Monitor())
    assert not loop.monitor.tensors
    loop(2.0)
    seen = {(t.layer, t.tensor): (t.amax, t.scale) for t in loop.monitor.tensors}
    assert seen == {  # no weight of the first, which is frozen
        ("0", "input"): (2.0, 1.0),
        ("0", "grad"): (16.0, 1.0),
        ("1", "input"): (32.0, 1.0),
        ("1", "weight"): (1.0, 1.0),
        ("1", "grad"): (1.0, 1.0),
    }


def test_a_step_is_shown_with_the_scale_that_it_used_and_the_amax_of_all_its_micro_batches() -> (
    None
):
    loop = Loop(Fp8Monitor())
    loop(2.0)
    loop(0.5, 1.0, 0.25)
    first = loop.monitor.tensors[0]
    assert (first.layer, first.tensor) == ("0", "input")
    assert (first.amax, first.scale) == (1.0, E4M3_MAX / 2.0)


def test_tensors_beyond_their_type_are_counted_once_a_step() -> None:
    loop = Loop(Fp8Monitor())
    assert loop(1.0) == {"fp8_num_saturated": 0}
    # The first linear's inputs are scaled for 1 and clipped to it, so the second's inputs grow one step later.
    assert loop(8.0, 8.0) == {"fp8_num_saturated": 1}
    assert loop(8.0) == {"fp8_num_saturated": 1}
    assert loop(8.0) == {"fp8_num_saturated": 0}
    counts = {(t.layer, t.tensor): t.num_saturated_steps for t in loop.monitor.tensors}
    assert counts[("0", "input")] == counts[("1", "input")] == 1
    assert sum(counts.values()) == 2


def test_a_resumed_run_counts_on() -> None:
    before = Loop(Fp8Monitor())
    before(1.0)
    before(8.0)
    after = Fp8Monitor()
    CallbackStates([after]).load_state_dict(CallbackStates([before.monitor]).state_dict())
    resumed = Loop(after, start=2)
    assert after.state_dict() == before.monitor.state_dict()
    resumed(1.0)
    resumed(8.0)
    assert [t.num_saturated_steps for t in after.tensors] == [2, 0, 0, 0, 0]


def test_the_file_has_a_row_per_tensor_every_n_steps(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fp8.csv"
    loop = Loop(Fp8Monitor(every_n_steps=2, path=path))
    for _ in range(5):
        loop(1.0)
    assert steps_of(path) == [2] * 5 + [4] * 5
    rows = read(path)
    assert rows[0] == {
        "step": "2",
        "layer": "0",
        "tensor": "input",
        "amax": "1.0",
        "scale": "448.0",
        "num_saturated_steps": "0",
    }


def test_the_file_of_a_resumed_run_is_cut_back_to_its_step(tmp_path: Path) -> None:
    path = tmp_path / "fp8.csv"
    loop = Loop(Fp8Monitor(every_n_steps=1, path=path))
    for _ in range(3):
        loop(1.0)
    resumed = Loop(Fp8Monitor(every_n_steps=1, path=path), start=1)
    resumed(1.0)
    assert steps_of(path) == [1] * 5 + [2] * 5


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps_of(path: Path) -> list[int]:
    return [int(row["step"]) for row in read(path)]


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_a_model_without_scales_that_change_is_refused(recipe: str) -> None:
    fabric = make_fabric(fp8={"backend": "torch", "recipe": recipe})
    model = fabric.setup(two_linears())
    message = (
        "no linear of the model keeps fp8 scales from step to step; set fp8 with recipe 'delay"
    )
    with pytest.raises(ConfigError, match=message):
        Fp8Monitor().on_before_optimizer_step(fabric=fabric, model=model)


def test_a_period_below_one_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps is 0, but must be at least 1"):
        Fp8Monitor(every_n_steps=0)


@on_fabric_rank
def a_rank_with_larger_inputs() -> None:
    fabric = make_fabric(devices=2, fp8=FP8)
    model = two_linears()
    module, optimizer = fabric.setup(model, torch.optim.SGD(model[1].parameters(), lr=0.0))
    monitor = Fp8Monitor()
    for _ in range(2):
        x = torch.full((16, 16), 1.0 + 7.0 * fabric.global_rank, requires_grad=True)
        fabric.backward(module(x).sum())
        monitor.on_before_optimizer_step(fabric=fabric, model=module)
        optimizer.step()
    assert monitor.tensors[0].amax == 8.0
    assert monitor.tensors[0].scale == E4M3_MAX / 8.0


def test_all_ranks_tell_of_the_largest_amax() -> None:
    run_on_fabric_ranks(a_rank_with_larger_inputs, 2)
