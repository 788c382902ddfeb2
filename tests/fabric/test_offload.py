"""Offload under Fabric: accumulation, shards on two ranks, and the settings' refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from harness import models
from harness.copy_engines import hostile_copies, small_values
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.budget.offload import terms
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import PlanError
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.settings.value_kinds import Bytes
from thunder_memsave.strategy import ThunderMemsaveStrategy

KEEP_ALL = {"policy": "keep_all"}


def offloading(budget_bytes: int) -> dict[str, Any]:
    return {"budget": budget_bytes, "offload": "activations", "host_budget": 2**28}


def accumulated(
    memory: dict[str, Any], *, devices: int = 1, **arguments: Any
) -> tuple[list[Tensor], Plan, str]:
    """Return the gradients of two micro-batches and of one after them, the plan, and what is said of it."""
    fabric = make_fabric(devices=devices, memory=memory, timeout="2min", **arguments)
    torch.manual_seed(0)
    module = models.llama(2)
    model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    ids = [models.token_batch(4, 32, seed=3 * fabric.global_rank + n) for n in range(3)]
    with fabric.no_backward_sync(model):
        fabric.backward(model(input_ids=ids[0], labels=ids[0]).loss)
    fabric.backward(model(input_ids=ids[1], labels=ids[1]).loss)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    fabric.backward(model(input_ids=ids[2], labels=ids[2]).loss)
    gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    assert fabric.strategy.plan is not None
    return gradients, fabric.strategy.plan, fabric.strategy.explain()


def check_against_keeping_all(**arguments: Any) -> None:
    expected, free, _ = accumulated(KEEP_ALL, **arguments)
    with small_values(), hostile_copies() as (engine, buffers):
        budget = free.predicted_peak_bytes * 6 // 10
        ours, plan, text = accumulated(offloading(budget), **arguments)
        assert engine.num_begun["out"] == engine.num_begun["in"] > 0
        assert buffers.count() == 0
        assert buffers.limit_bytes == 2**28
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert plan.actions.offloaded
    assert plan.predicted_peak_bytes <= budget
    assert "on the host meanwhile" in text
    assert "copies not hidden" in text
    assert "offload " in text


def test_micro_batches_accumulate_the_gradients_of_keeping_all() -> None:
    check_against_keeping_all()


@on_fabric_rank
def check_shards() -> None:
    check_against_keeping_all(devices=2, sharding="zero3", accumulate="reduce_every")
    check_against_keeping_all(devices=2, sharding="zero2", accumulate="accumulate_unsharded")


def test_two_ranks_that_shard_run_one_plan_with_the_gradients_of_keeping_all() -> None:
    run_on_fabric_ranks(check_shards, 2)


def test_the_host_has_half_of_what_is_free_unless_bytes_are_given() -> None:
    memory = MemoryConfig(offload="activations")
    cpu = device("cpu")
    found = terms.offload_terms(memory, cpu, free_bytes=1000)
    assert found is not None
    assert found.host_bytes == 500
    given = terms.offload_terms(
        MemoryConfig(offload="activations", host_budget=Bytes(700)), cpu, free_bytes=None
    )
    assert given is not None
    assert given.host_bytes == 700
    assert terms.offload_terms(MemoryConfig(), cpu, free_bytes=1000) is None
    with pytest.raises(PlanError, match=r"memory.host_budget is auto, half of the host's free mem"):
        terms.offload_terms(memory, cpu, free_bytes=None)


def test_settings_that_have_no_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory.host_budget is 700, and has no effect where"):
        MemoryConfig(host_budget=Bytes(700), offload="none")
    with pytest.raises(ConfigError, match=r"memory.offload is 'activations', and has no effect"):
        MemoryConfig(offload="activations", policy="keep_all")
