"""200 random graphs give the same bits whatever is kept: outputs, gradients, generator and buffers."""

from __future__ import annotations

import pytest
import torch
from thunder.core.trace import TraceCtx
from torch import Tensor

from harness.random_graphs import graph, source
from harness.recompute import Choice, Step, at_random, joint_trace, nothing, run_joint
from thunder_memsave.passes import recompute as module
from thunder_memsave.passes.recompute import recompute
from thunder_memsave.planner.actions import keeping

NUM_GRAPHS = 200
NUM_ALWAYS = 60  # the others with `make soak`


def joint(seed: int) -> TraceCtx:
    return joint_trace(graph(seed), torch.zeros(4, 6))


def inputs(trace: TraceCtx) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tuple(a.shape), generator=generator) / 3 for a in trace.args]


def same(ours: Step, reference: Step) -> bool:
    pairs = [
        *zip(ours.outputs, reference.outputs, strict=True),
        *zip(ours.gradients, reference.gradients, strict=True),
        *zip(ours.inputs, reference.inputs, strict=True),
        (ours.generator, reference.generator),
    ]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def check(first: int, last: int) -> None:
    for seed in range(first, last):
        trace = joint(seed)
        reference = run_joint(trace, inputs(trace))
        choices: tuple[Choice, ...] = (nothing, at_random(0.3, seed=seed))
        for choose in choices:
            again = recompute(trace, actions=keeping(choose(trace)))
            ours = run_joint(again, inputs(trace))
            assert same(ours, reference), f"{choose} on graph {seed}:\n{source(seed)}"


@pytest.mark.parametrize("first", range(0, NUM_ALWAYS, 15))
def test_no_bit_changes(first: int) -> None:
    check(first, first + 15)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(NUM_ALWAYS, NUM_GRAPHS, 35))
def test_no_bit_changes_in_the_others(first: int) -> None:
    check(first, min(first + 35, NUM_GRAPHS))


def test_the_graphs_contain_what_they_are_for() -> None:
    texts = [source(seed) for seed in range(NUM_GRAPHS)]
    for construct in (
        "dropout",
        "chunk",
        "topk",
        "view",
        "expand",
        ".add_(",
        ".mul_(",
        "self.seen",
    ):
        assert sum(construct in t for t in texts) > 20, construct


def test_redrawn_numbers_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "draws_random_numbers", lambda _: False)
    seed = next(s for s in range(NUM_GRAPHS) if "dropout(y" in source(s))
    trace = joint(seed)
    ours = run_joint(recompute(trace, actions=keeping(nothing(trace))), inputs(trace))
    assert not same(ours, run_joint(trace, inputs(trace)))
