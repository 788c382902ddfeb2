"""Gradients on four ranks are as close to exact ones as those of one process in float32, however they are made."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.sharding import gather_rows, is_sharded
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 4
NUM_MICRO_BATCHES = 3
ROWS_PER_RANK = 4
SEQUENCE_LENGTH = 8

MODES: dict[str, Any] = {"zero2": "zero2", "zero3": "zero3", "2x2": {"mode": "hybrid", "size": 2}}
ACCUMULATE = ("off", "reduce_every", "accumulate_unsharded")
MODELS = ("all trainable", "lora", "tied", "odd")
WINDOWS = (0, "auto")


@dataclass(frozen=True)
class Case:
    """One way to make gradients."""

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


class Adapted(nn.Module):
    """A frozen layer, and what is trained beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.randn(base.out_features, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Block(nn.Module):
    def __init__(self, width: int, inner: int, *, lora: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up: nn.Module = nn.Linear(width, inner)
        self.down: nn.Module = nn.Linear(inner, width)
        if lora:
            self.norm.requires_grad_(False)
            self.up, self.down = Adapted(nn.Linear(width, inner)), Adapted(nn.Linear(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        vocabulary, width, inner = (13, 7, 9) if kind == "odd" else (16, 8, 12)
        self.embedding = nn.Embedding(vocabulary, width)
        blocks = [Block(width, inner, lora=kind == "lora") for _ in range(2)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.25))
        if kind == "lora":
            self.embedding.requires_grad_(False)
            self.head.requires_grad_(False)
        if kind == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embedding(tokens))) * self.scale
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(kind)


def tokens(seed: int) -> Tensor:
    """Rows of all ranks, one rank's after the other's."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(13, (NUM_RANKS * ROWS_PER_RANK, SEQUENCE_LENGTH), generator=generator)


def num_micro_batches(case: Case) -> int:
    return 1 if case.accumulate == "off" else NUM_MICRO_BATCHES


def one_process(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of eager PyTorch on all rows."""
    model = build(case.model).to(dtype)
    for seed in range(num_micro_batches(case)):
        model(tokens(seed)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def all_ranks(case: Case) -> dict[str, Tensor]:
    """The same by the strategy, each rank on its rows."""
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
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_exact_in_every_combination(mode: str, model: str) -> None:
    cases = [case for case in ALL if (case.mode, case.model) == (mode, model)]
    run_on_fabric_ranks(check_all, NUM_RANKS, cases)
