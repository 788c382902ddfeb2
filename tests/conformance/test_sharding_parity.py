"""Gradients on four ranks are as close to exact ones as those of one process in float32, in every configuration."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor

from harness.distributed import SOAK_HANG_S
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.four_models import KINDS as MODELS
from harness.four_models import SMALLEST_VOCABULARY, build
from thunder_memsave.sharding.rows import gather_rows
from thunder_memsave.sharding.sharded_parameter import is_sharded
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 4
NUM_MICRO_BATCHES = 3
ROWS_PER_RANK = 4
SEQUENCE_LENGTH = 8

MODES: dict[str, Any] = {"zero2": "zero2", "zero3": "zero3", "2x2": {"mode": "hybrid", "size": 2}}
ACCUMULATE = ("off", "reduce_every", "accumulate_unsharded")
WINDOWS = (0, "auto")


@dataclass(frozen=True)
class Case:
    """One configuration."""

    mode: str
    accumulate: str
    model: str
    window: int | str


ALL = [Case(*values) for values in itertools.product(MODES, ACCUMULATE, MODELS, WINDOWS)]
PAIRS = [
    Case(list(MODES)[(i + j) % 3], accumulate, model, WINDOWS[(i + j) % 2])
    for i, model in enumerate(MODELS)
    for j, accumulate in enumerate(ACCUMULATE)
]


def tokens(seed: int) -> Tensor:
    """Return the rows of all ranks, one rank's after the other's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        SMALLEST_VOCABULARY, (NUM_RANKS * ROWS_PER_RANK, SEQUENCE_LENGTH), generator=generator
    )


def num_micro_batches(case: Case) -> int:
    return 1 if case.accumulate == "off" else NUM_MICRO_BATCHES


def one_process(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of eager PyTorch on all rows."""
    model = build(case.model).to(dtype)
    for seed in range(num_micro_batches(case)):
        model(tokens(seed)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def all_ranks(case: Case) -> dict[str, Tensor]:
    """Return the gradients under the strategy, with each rank on its rows."""
    accumulate = "auto" if case.accumulate == "off" else case.accumulate
    fabric = make_fabric(
        devices=NUM_RANKS,
        sharding=MODES[case.mode],
        accumulate=accumulate,
        prefetch=case.window,
        timeout="2min",
    )
    model: Any = fabric.setup(build(case.model))
    last = num_micro_batches(case) - 1
    for seed in range(last + 1):
        rows = tokens(seed).split(ROWS_PER_RANK)[fabric.global_rank]
        with fabric.no_backward_sync(model, enabled=seed < last):
            fabric.backward(model(rows))
    named = model._original_module.named_parameters()
    return {name: whole_gradient(fabric, p) for name, p in named if p.grad is not None}


def whole_gradient(fabric: Fabric, p: Any) -> Tensor:
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    data_parallel = fabric.strategy.data_parallel
    assert data_parallel is not None
    return gather_rows(p.grad, p.unsharded_shape, data_parallel) if is_sharded(p) else p.grad


def check(case: Case) -> None:
    exact, single = one_process(case, torch.float64), one_process(case, torch.float32)
    ours = all_ranks(case)
    assert ours.keys() == exact.keys()
    for name, gradient in exact.items():
        allowed = 2 * distance(single[name], gradient) + 1e-7 * float(gradient.norm())
        found = distance(ours[name], gradient)
        assert found <= allowed, f"{case}, {name}: {found:.2e}, allowed {allowed:.2e}"


def distance(gradient: Tensor, exact: Tensor) -> float:
    return float((gradient.double() - exact).norm())


@on_fabric_rank
def check_all(cases: list[Case]) -> None:
    for case in cases:
        check(case)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(range(4), 2)))
def test_the_pairs_cover_every_two_choices(first: int, second: int) -> None:
    factors = [list(MODES), ACCUMULATE, MODELS, WINDOWS]
    covered = {(values(case)[first], values(case)[second]) for case in PAIRS}
    assert covered == set(itertools.product(factors[first], factors[second]))


def values(case: Case) -> tuple[Any, ...]:
    return (case.mode, case.accumulate, case.model, case.window)


def test_gradients_are_as_exact_as_those_of_one_process() -> None:
    run_on_fabric_ranks(check_all, NUM_RANKS, PAIRS)


@pytest.mark.soak
@pytest.mark.timeout(SOAK_HANG_S + 60)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_exact_in_every_combination(mode: str, model: str) -> None:
    cases = [case for case in ALL if (case.mode, case.model) == (mode, model)]
    run_on_fabric_ranks(check_all, NUM_RANKS, cases, hang_s=SOAK_HANG_S)
