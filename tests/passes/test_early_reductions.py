"""Under `frontend: aot`, each gradient is reduced as soon as it is there, as under `dynamo`, with the bits of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.traces import fake_ranks, unlimited_planner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.passes.early_reductions import reduce_early
from thunder_memsave.passes.overlap.facts import is_reduction
from thunder_memsave.sharding.rows import shard_module

NUM_LAYERS, WIDTH = 6, 64


def layers() -> nn.Sequential:
    """Padded rows, a tied weight, a frozen one, and biases; the weights are most of the memory."""
    torch.manual_seed(0)
    made = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*made, nn.Linear(WIDTH, 5))
    model[2].weight.requires_grad_(False)
    model[6].weight = model[4].weight
    return model


def compiled(frontend: Any, mode: str) -> CompiledModule:
    model = layers()
    with fake_ranks(2, mode=mode) as data_parallel:
        shard_module(model, data_parallel)
        planner = unlimited_planner(MemoryConfig(), data_parallel)
        config = CompileConfig(frontend=frontend)
        module = CompiledModule(model, config=config, data_parallel=data_parallel, planner=planner)
        module(torch.ones(2, WIDTH))
    return module


def peak_bytes(module: CompiledModule) -> int:
    assert module.planner is not None
    plan = module.planner.calls[-1].plan
    assert plan is not None
    return plan.predicted_peak_bytes


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_whole_gradients_die_one_by_one(mode: str) -> None:
    aot, dynamo = compiled("aot", mode), compiled("dynamo", mode)
    assert peak_bytes(aot) <= 1.05 * peak_bytes(dynamo)
    (backward,) = aot.captures[-1].backward_traces
    symbols = backward.bound_symbols
    reductions = [i for i, b in enumerate(symbols) if is_reduction(b)]
    products = [i for i, b in enumerate(symbols) if "aten_mm" in b.sym.name]
    assert len(reductions) > NUM_LAYERS
    assert sum(i < reductions[0] for i in products) <= 2
    assert sum(i > reductions[-2] for i in products) <= 2


def test_what_is_early_already_stays_as_it_is() -> None:
    trace = compiled("aot", "zero3").captures[-1].forward_traces[-1]
    assert reduce_early(trace) is trace


@on_fabric_rank
def check_gradients() -> None:
    x = torch.randn(3, WIDTH)
    for mode in ("zero2", "zero3", "none"):
        both: list[list[Tensor]] = []
        for frontend in ("aot", "dynamo"):
            fabric = make_fabric(devices=2, sharding=mode, frontend=frontend, timeout="2min")
            model = fabric.setup(layers())
            fabric.backward(model(x).square().sum())
            both.append([p.grad for p in model.parameters() if p.grad is not None])
        assert len(both[0]) == len(both[1]) == 2 * NUM_LAYERS
        for ours, theirs in zip(*both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_two_ranks_have_the_gradients_of_dynamo() -> None:
    run_on_fabric_ranks(check_gradients, 2)
