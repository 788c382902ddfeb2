"""Each gradient is reduced as soon as it is there, not after all of backward; the ranks' gradients are eager's."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.traces import fake_ranks, unlimited_planner
from thunder_memsave.compiler import joint_steps
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.passes.overlap.early_reductions import reduce_early
from thunder_memsave.passes.overlap.facts import is_reduction
from thunder_memsave.sharding.rows import gather_rows, shard_module

NUM_LAYERS, WIDTH = 6, 64
MOST_BYTES = {"zero2": 143_000, "zero3": 111_000}
"""Of a step: under zero3 the rows of weights and gradients, two whole weights, and few kilobytes beside them."""


def layers() -> nn.Sequential:
    """Padded rows, a tied weight, a frozen one, and biases; the weights are most of the memory."""
    torch.manual_seed(0)
    made = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*made, nn.Linear(WIDTH, 5))
    model[2].weight.requires_grad_(False)
    model[6].weight = model[4].weight
    return model


def compiled(mode: str) -> CompiledModule:
    model = layers()
    with fake_ranks(2, mode=mode) as data_parallel:
        shard_module(model, data_parallel)
        planner = unlimited_planner(MemoryConfig(), data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
        module(torch.ones(2, WIDTH))
    return module


def peak_bytes(module: CompiledModule) -> int:
    assert module.planner is not None
    plan = module.planner.calls[-1].plan
    assert plan is not None
    return plan.predicted_peak_bytes


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_whole_gradients_die_one_by_one(mode: str) -> None:
    module = compiled(mode)
    with patch.object(joint_steps, "reduce_early", lambda trace: trace):
        late = compiled(mode)
    assert peak_bytes(module) <= min(MOST_BYTES[mode], peak_bytes(late))
    assert mode == "zero2" or peak_bytes(late) > MOST_BYTES[mode]  # zero2's is no larger here
    (backward,) = module.captures[-1].backward_traces
    symbols = backward.bound_symbols
    reductions = [i for i, b in enumerate(symbols) if is_reduction(b)]
    products = [i for i, b in enumerate(symbols) if "aten_mm" in b.sym.name]
    assert len(reductions) > NUM_LAYERS
    assert sum(i < reductions[0] for i in products) <= 2
    assert sum(i > reductions[-2] for i in products) <= 2


def test_what_is_early_already_stays_as_it_is() -> None:
    trace = compiled("zero3").captures[-1].forward_traces[-1]
    assert reduce_early(trace) is trace


@on_fabric_rank
def check_gradients() -> None:
    x = torch.randn(3, WIDTH)
    reference = layers()
    reference(x).square().sum().backward()
    expected = [p.grad for p in reference.parameters() if p.grad is not None]
    for mode in ("zero2", "zero3", "none"):
        fabric = make_fabric(devices=2, sharding=mode, timeout="2min")
        model = fabric.setup(layers())
        fabric.backward(model(x).square().sum())
        data_parallel = fabric.strategy.data_parallel  # type: ignore[attr-defined]
        ours = [
            p.grad if mode == "none" else gather_rows(p.grad, p.unsharded_shape, data_parallel)
            for p in model.parameters()
            if p.grad is not None
        ]
        assert len(ours) == len(expected) == 2 * NUM_LAYERS
        for gradient, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(gradient, theirs, rtol=1e-6, atol=1e-7)


def test_two_ranks_that_read_the_same_batch_have_the_gradients_of_eager() -> None:
    run_on_fabric_ranks(check_gradients, 2)
