"""Few layers of a model tell about what all of them need, and how fast they are."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from thunder_memsave.budget import plan_request
from thunder_memsave.finetune.model.build import describe_model
from thunder_memsave.finetune.plan.few_layers import NUM, FewLayers, has_many_layers
from thunder_memsave.finetune.plan.plan_run import RunPlan, plan_run
from thunder_memsave.finetune.plan.search.forecast import Forecast
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.search.solve import solve

CONSTANT = 67_200_000
"""Bytes of a workspace on this device."""
WORDS = {
    "full": ("--lora=null",),
    "lora": (),
    "full, recomputed": ("--lora=null", f"--memory.budget={CONSTANT + 17_000_000}"),
    "replicated": ("--strategy.sharding=none",),
    "gathered once": ("--strategy.sharding=zero2",),
    "in 8 bits": ("--model.frozen_weights=int8",),
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_request, "solve", partial(solve, time_limit_s=1.0))
    monkeypatch.setattr("thunder_memsave.finetune.plan.run_planner._SMALLEST_S", 0.1)


def loaded(run_file: str, *words: str, num_layers: int = 3 * NUM) -> RunConfig:
    layers = f"--model.architecture.num_hidden_layers={num_layers}"
    return load_run_config(run_file, [layers, "--memory.limits=tensors", *words])


def planned(config: RunConfig, *, has_few_layers: bool) -> RunPlan:
    return plan_run(
        config,
        device=DEVICES["h100"],
        num_ranks=2,
        has_curve=False,
        has_few_layers=has_few_layers,
    )


@pytest.mark.parametrize(
    "case", ["full", *(pytest.param(c, marks=pytest.mark.soak) for c in list(WORDS)[1:])]
)
def test_an_estimate_is_near_the_plan(run_file: str, case: str) -> None:
    config = loaded(run_file, *WORDS[case])
    about, exact = (
        Forecast.of_plan(planned(config, has_few_layers=each)) for each in (True, False)
    )
    assert about.is_estimate
    assert not exact.is_estimate
    assert about.fits == exact.fits
    assert about.budget_bytes == exact.budget_bytes
    assert about.tokens_per_s == pytest.approx(exact.tokens_per_s, rel=0.02)
    assert about.peak_bytes - CONSTANT == pytest.approx(exact.peak_bytes - CONSTANT, rel=0.1)
    assert about.recomputes_for_budget == exact.recomputes_for_budget


def test_what_needs_far_more_than_the_budget_is_refused(run_file: str) -> None:
    budget_bytes = CONSTANT + 1_000_000
    config = loaded(run_file, "--lora=null", f"--memory.budget={budget_bytes}")
    made = planned(config, has_few_layers=True)
    forecast = Forecast.of_plan(made)
    assert not any(f".{NUM}." in op.module for op in made.call.graph.ops)
    assert not forecast.fits
    assert forecast.peak_bytes == forecast.least_bytes > 1.1 * budget_bytes


def test_layers_are_left_out_of_a_model_with_many(run_file: str) -> None:
    model = describe_model(loaded(run_file))
    assert has_many_layers(model)
    few = FewLayers.left_of(model)
    assert few is not None
    assert (few.num_all, few.times_as_many) == (3 * NUM, 3.0)
    assert len(model.get_submodule(few.path)) == NUM  # type: ignore[arg-type]
    assert not has_many_layers(model)
    assert FewLayers.left_of(model) is None


def test_layers_of_different_shapes_stay(run_file: str) -> None:
    model = describe_model(loaded(run_file))
    attention = model.get_submodule("base_model.model.model.layers.5.self_attn")
    attention.add_module("more", nn.Linear(1, 1))
    assert not has_many_layers(model)


def test_a_budget_is_given_and_taken_in_proportion() -> None:
    few = FewLayers(path="layers", num_all=10 * NUM, constant_bytes=1000)
    assert few.budget_bytes(11_000) == 2000
    assert few.of_all(2000) == 11_000
    assert few.budget_bytes(500) == 1000  # nothing is left for layers
