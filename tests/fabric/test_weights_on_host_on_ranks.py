"""Frozen weights on the hosts of two ranks, whole or as shards: the same bits, the planned peak, files as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from harness.copy_engines import hostile_copies
from harness.effort import little_effort
from harness.fabric import on_fabric_rank, run_on_fabric_ranks
from harness.host_weights import HostWeightsRun as Run
from harness.host_weights import small_host_weights
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from thunder_memsave.budget.offload import last_resort
from thunder_memsave.ops.host_copies.weights import place_of

NUM_RANKS = 2
ALL: dict[str, Any] = {"offload_weights": ("model.layers",), "host_budget": 2**28}
MORE: tuple[dict[str, Any], ...] = (
    {"sharding": "zero2"},
    {"sharding": "none"},
    {"sharding": "zero3", "prefetch": 0},
    {"sharding": "zero3", "frozen_weights": "nf4"},
    {"sharding": "zero3", "fp8": {"recipe": "current"}},
    {"sharding": "zero3", "fp8": {"recipe": "block"}},
    {"sharding": "zero3", "fp8": {"frozen_weights": "fp8"}},
    {"sharding": "none", "fp8": {"recipe": "block"}},
)


def made(memory: dict[str, Any], **settings: Any) -> Run:
    return Run(memory, num_layers=3, devices=NUM_RANKS, **settings)


def check_bits(settings: dict[str, Any]) -> None:
    here = made({}, **settings).steps()
    with hostile_copies() as (engine, _):
        there = made(ALL, **settings).steps()
        assert len(there.on_host) == 3 * 7
        if (
            settings.get("fp8", {}).get("recipe") != "current"
        ):  # reads a shard once more, for its amax
            assert engine.num_begun == {"out": 0, "in": 2 * 2 * len(there.on_host)}
        with torch.no_grad():
            logits = there.model(input_ids=there.ids).logits
        assert torch.equal(logits, here.model(input_ids=here.ids).logits)
        assert there.same_as(here)


def check_peak(settings: dict[str, Any]) -> None:
    there = made({**ALL, "policy": "recompute_all"}, **settings).steps(1)

    def step() -> None:
        output = there.model(input_ids=there.ids, labels=there.ids)
        there.fabric.backward(output.loss)
        there.optimizer.step()

    held = [p for p in there.net.parameters() if place_of(p) is None]
    before = sum(t.nbytes for t in (*held, *there.net.buffers(), there.ids))
    with letting_go():
        measured = measured_memory(step)
    assert there.peak_bytes == before + measured.peak_bytes


def check_plan(settings: dict[str, Any]) -> None:
    """Where nothing else fits, all ranks keep the same layers on their hosts."""
    here = made({}, **settings).steps()
    smallest = made({"policy": "recompute_all"}, **settings).steps(1).peak_bytes
    budget = smallest * 62 // 100
    with patch.object(last_resort, "is_host", lambda _: False), hostile_copies(), little_effort():
        there = made({"budget": budget, "host_budget": 2**28}, **settings).steps()
        assert there.same_as(here)
    assert there.peak_bytes <= budget
    of_ranks: list[list[str]] = [[] for _ in range(NUM_RANKS)]
    dist.all_gather_object(of_ranks, there.on_host)
    assert of_ranks[0] == of_ranks[1] != []


def check_files(directory: Path) -> None:
    here = made({}, sharding="zero3").steps()
    there = made(ALL, sharding="zero3").steps()
    there.fabric.save(directory / "there", {"model": there.model})
    with here.strategy.summon_full(here.net), there.strategy.summon_full(there.net):
        assert all(map(torch.equal, here.net.parameters(), there.net.parameters()))
    assert there.steps(1).same_as(here.steps(1))
    again = made(ALL, sharding="zero3")
    again.fabric.load(directory / "there", {"model": again.model})
    assert again.steps(1).same_as(here)
    assert len(again.on_host) == len(there.on_host)


@on_fabric_rank
def check_ranks(directory: Path) -> None:
    with small_host_weights():
        check_plan({"sharding": "zero3"})
        check_files(directory)


@on_fabric_rank
def check_more() -> None:
    with small_host_weights():
        for settings in MORE:
            check_bits(settings)
        for sharding in ("none", "zero2", "zero3"):
            check_peak({"sharding": sharding})


def test_ranks_have_the_bits_of_weights_on_their_devices(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_ranks, NUM_RANKS, tmp_path)


@pytest.mark.soak
def test_ranks_have_the_bits_with_other_settings() -> None:
    run_on_fabric_ranks(check_more, NUM_RANKS)
