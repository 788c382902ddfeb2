"""Encoders, mixtures of experts and models of images: bits and bytes are as planned; routes of Python are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness import families, models
from harness.memory import measured_peak_bytes
from harness.parity import Twins
from thunder_memsave.budget import plan_request
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError, CaptureError
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan
from thunder_memsave.planner.search.solve import solve

BERT: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def experts(implementation: str, build: Callable[[], Any] = models.mixtral) -> Any:
    """Each of transformers' implementations routes tokens to experts in its own way."""
    model = build()
    model.set_experts_implementation(implementation)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: models.bert(**BERT),
    "experts": lambda: experts("batched_mm"),
}


SOFTMAX_IN_FP32: dict[str, Callable[[], nn.Module]] = {
    "bloom": models.bloom,
    "gpt_oss": partial(experts, "batched_mm", models.gpt_oss),
    "qwen2_moe": partial(experts, "batched_mm", models.qwen2_moe),
    "qwen3_moe": partial(experts, "batched_mm", models.qwen3_moe),
}
"""They ask softmax for another dtype than that of their numbers."""

WITH_CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "segformer": models.segformer,
    "vit": models.vit,
    "clip": models.clip,
}


@pytest.fixture(autouse=True)
def _good_enough_plans() -> Iterator[None]:
    with patch.object(plan_request, "solve", partial(solve, time_limit_s=1.0)):
        yield


def first_at_once(names: Iterable[str]) -> list[Any]:
    """The others take as many seconds each, and are left to `make soak`."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.soak) for name in others)]


def keep_all() -> MemoryPlanner:
    return MemoryPlanner(MemoryConfig(policy="keep_all"), device=device("cpu"), budget_bytes=None)


def step(
    model: nn.Module, ids: Tensor, *, policy: Any, budget_bytes: int | None
) -> tuple[Plan, list[Tensor]]:
    """The plan, and what a step computes: loss, gradients, and the generator's state."""
    memory = MemoryConfig(policy=policy)
    planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=budget_bytes)
    compiled = CompiledModule(model, planner=planner)
    torch.manual_seed(1)
    loss = compiled(input_ids=ids, labels=ids).loss
    loss.backward()
    computed = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    plan = planner.calls[-1].plan
    assert plan is not None
    return plan, [*computed, torch.get_rng_state()]


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_every_budget_gives_the_bits_of_keeping_all(build: Callable[[], nn.Module]) -> None:
    model, ids = build().train(), models.token_batch(8, 24)
    kept, expected = step(model, ids, policy="keep_all", budget_bytes=None)
    with pytest.raises(BudgetError, match="no plan was found that stays within it") as error:
        step(model, ids, policy="plan", budget_bytes=1)
    smallest_bytes = error.value.smallest_bytes
    assert smallest_bytes is not None
    for budget_bytes in (smallest_bytes, (smallest_bytes + kept.predicted_peak_bytes) // 2):
        plan, computed = step(model, ids, policy="plan", budget_bytes=budget_bytes)
        assert plan.predicted_peak_bytes <= budget_bytes
        assert plan.recompute_us > 0
        assert plan.actions != kept.actions
        assert len(computed) == len(expected) > 10
        assert all(map(torch.equal, computed, expected))


def test_experts_have_the_gradients_of_eager() -> None:
    ids = models.token_batch()
    Twins(experts("batched_mm")).assert_equal(
        input_ids=ids, labels=ids, loss=lambda output: output.loss
    )


def test_experts_that_python_chooses_by_the_values_of_tensors_are_refused() -> None:
    ids = models.token_batch()
    text = r"depends on the numbers in a tensor \(at .*modeling_mixtral.py:\d+ in forward\)"
    with pytest.raises(CaptureError, match=text):
        CompiledModule(experts("eager"))(input_ids=ids, labels=ids)


@pytest.mark.parametrize("name", first_at_once(SOFTMAX_IN_FP32))
def test_planned_training_and_evaluation_are_those_of_eager(name: str) -> None:
    ids = models.token_batch()
    twins = Twins(SOFTMAX_IN_FP32[name]().train(), planner=keep_all())
    twins.assert_equal(input_ids=ids, labels=ids, loss=lambda output: output.loss)
    twins.change(lambda m: m.eval())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            twins.assert_equal(input_ids=ids, labels=ids, rtol=0.0, atol=0.0)
    assert twins.num_captures == 3


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache:UserWarning")
@pytest.mark.parametrize("name", first_at_once(families.of_torchs_own()))
def test_models_with_functions_of_torchs_own_have_the_gradients_of_eager(name: str) -> None:
    sample = families.sample(name)
    sample.module(**sample.arguments)  # transformers puts its hooks in place, which Dynamo refuses
    twins = Twins(sample.module, planner=keep_all())
    twins.assert_equal(**sample.arguments, loss=sample.loss)


@pytest.mark.parametrize("name", first_at_once(WITH_CONVOLUTIONS))
def test_a_step_of_a_model_with_convolutions_takes_the_bytes_that_were_predicted(name: str) -> None:
    model, batch = WITH_CONVOLUTIONS[name]().train(), images()
    if name == "clip":
        batch = {**batch, "input_ids": models.token_batch(), "return_loss": True}
        del batch["labels"]
    model(**batch)  # transformers puts its hooks in place, which Dynamo refuses
    planner = keep_all()
    compiled = CompiledModule(model, planner=planner)

    def run() -> None:
        outputs = compiled(**batch)  # the caller is taken to hold all of them
        outputs.loss.backward()

    run()
    model.zero_grad()
    call = planner.calls[-1]
    held_bytes = sum(call.program.storages[s].nbytes for s in call.program.held)
    held_bytes += call.memory.other_bytes
    assert measured_peak_bytes(run) == call.profile.peak_bytes - held_bytes > 90_000


def images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}
