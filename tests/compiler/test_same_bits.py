"""Five optimizer steps on two ranks, planned, give the bits of unplanned ones in every mode, window and bucket."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.distributed import SOAK_HANG_S, run_on_ranks
from harness.four_models import KINDS, SMALLEST_VOCABULARY, build
from harness.traces import unlimited_planner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.passes.overlap.schedule import two_largest_blocks
from thunder_memsave.passes.recompute import PREFIX
from thunder_memsave.sharding.rows import gather_full, shard_module

NUM_RANKS = 2
NUM_STEPS = 5

MODES = ("none", "zero2", "zero3")
WINDOWS: tuple[int | str, ...] = (0, 500, "auto", 10**9)
"""`auto` is 2,080 bytes at least; 500 is less than one matrix, and more than one of the vectors."""
BUCKETS = (0, 200, 10**9)


@dataclass(frozen=True)
class Case:
    """One way to make steps."""

    model: str
    mode: str
    window: int | str
    bucket: int


ALL = [Case(*values) for values in itertools.product(KINDS, MODES, WINDOWS, BUCKETS)]
PAIRS = [
    Case(model, MODES[(i + j) % 3], window, BUCKETS[(i + 2 * j) % 3])
    for i, model in enumerate(KINDS)
    for j, window in enumerate(WINDOWS)
]


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(NUM_RANKS * step + rank)
    return torch.randint(SMALLEST_VOCABULARY, (3, 8), generator=generator)


def steps(case: Case, *, planned: bool = True) -> list[Tensor]:
    """Losses, and the whole weights after every step; `planned`: by the strategy's default."""
    assert dist.group.WORLD is not None
    settings: dict[str, Any] = {"mode": case.mode, "prefetch": case.window}
    data_parallel = DataParallel(group=dist.group.WORLD, bucket_bytes=case.bucket, **settings)
    model = build(case.model)
    shard_module(model, data_parallel)
    planner = unlimited_planner(MemoryConfig(), data_parallel) if planned else None
    module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    results = []
    for step in range(NUM_STEPS):
        loss = module(batch(data_parallel.rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach(), *(gather_full(p, data_parallel).clone() for p in trained)]
    assert not planned or computes_again(module)
    return results


def computes_again(module: CompiledModule) -> bool:
    (capture,) = module.captures
    backward = capture.backward_traces[-1]
    return any(o.name.startswith(PREFIX) for b in backward.bound_symbols for o in b.flat_proxy_outs)


def check_all(rank: int, cases: list[Case]) -> None:
    references = {
        model: steps(Case(model, "zero2", 0, 0), planned=False)
        for model in dict.fromkeys(c.model for c in cases)
    }
    for case in cases:
        reference = references[case.model]
        assert len(reference) > 5 * NUM_STEPS
        assert not torch.equal(reference[1], reference[-len(reference) // NUM_STEPS + 1])
        for ours, expected in zip(steps(case), reference, strict=True):
            assert torch.equal(ours, expected), case


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(range(4), 2)))
def test_the_pairs_cover_every_two_choices(first: int, second: int) -> None:
    factors = [KINDS, MODES, WINDOWS, BUCKETS]
    covered = {(values(case)[first], values(case)[second]) for case in PAIRS}
    assert covered == set(itertools.product(factors[first], factors[second]))


def values(case: Case) -> tuple[Any, ...]:
    return (case.model, case.mode, case.window, case.bucket)


def test_the_windows_and_buckets_are_of_different_sizes_to_the_models() -> None:
    for kind in KINDS:
        sizes = sorted(p.numel() * p.element_size() for p in build(kind).parameters())
        assert sizes[1] < BUCKETS[1] < 500 < two_largest_blocks(build(kind)) < BUCKETS[-1]
        assert sizes[-1] > BUCKETS[1]


@pytest.mark.parametrize("models", [KINDS[:2], KINDS[2:]])
def test_the_bits_do_not_depend_on_mode_window_and_bucket(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    cases = [case for case in PAIRS if case.model in models]
    run_on_ranks(check_all, NUM_RANKS, tmp_path / "rendezvous", cases)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S + 60)
@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_bits_are_the_same_in_every_combination(model: str, mode: str, tmp_path: Path) -> None:
    cases = [case for case in ALL if (case.model, case.mode) == (model, mode)]
    run_on_ranks(check_all, NUM_RANKS, tmp_path / "rendezvous", cases, hang_s=SOAK_HANG_S)
