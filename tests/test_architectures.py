"""Encoders and mixtures of experts have the bits of keeping all at every budget; routes of Python are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from harness import models
from harness.parity import Twins
from thunder_memsave import plan_question
from thunder_memsave.compile import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError, CaptureError
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan
from thunder_memsave.planner.solve import solve
from thunder_memsave.planning import MemoryPlanner

BERT: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def experts(implementation: str) -> Any:
    """Each of transformers' implementations routes tokens to experts in its own way."""
    model: Any = models.mixtral()
    model.set_experts_implementation(implementation)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: models.bert(**BERT),
    "experts": lambda: experts("batched_mm"),
}


@pytest.fixture(autouse=True)
def _good_enough_plans() -> Iterator[None]:
    with patch.object(plan_question, "solve", partial(solve, time_limit_s=1.0)):
        yield


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
        assert len(computed) == len(expected) > 10
        assert all(map(torch.equal, computed, expected))


def test_experts_have_the_gradients_of_eager() -> None:
    ids = models.token_batch()
    Twins(experts("batched_mm")).assert_equal(
        input_ids=ids, labels=ids, loss=lambda output: output.loss
    )


def test_experts_that_python_chooses_by_the_values_of_tensors_are_refused() -> None:
    ids = models.token_batch()
    text = r"cannot be captured as one graph: .*modeling_mixtral.py:\d+ in forward\)\. Move that code out"
    with pytest.raises(CaptureError, match=text):
        CompiledModule(experts("eager"))(input_ids=ids, labels=ids)
