"""Some of the modules of `benchmarks/plain_kinds`: numbers, buffers and attributes are eager's, on two ranks too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.fabric import on_fabric_rank, run_on_fabric_ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Dynamo looks at it, and hides the warning unless warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings(
        "ignore:None of the inputs have requires_grad"
    ),  # torch's, of a checkpoint
]

ALONE = (
    "CheckpointedDropout",
    "Conditional",
    "CopiedPiece",
    "DifferentiatedPiece",
    "VmappedPiece",
)
ON_RANKS = ("CheckpointedDropout", "CopiedPiece", "Pruned", "VmappedPiece")


@pytest.mark.parametrize("name", ALONE)
def test_two_steps_and_evaluation_are_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from plain_checks import checked

    outcome = checked(name, ("train", "evaluate"))
    assert outcome.runs, outcome.reasons


class Counts(nn.Module):
    """Has another attribute, and slightly other numbers, when it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 2 if self.by_count and torch.compiler.is_compiling() else 1
        factor = 1.00001 if not self.by_count and torch.compiler.is_compiling() else 1.0
        return self.linear(x) * factor

    by_count = False


class CountsTwice(Counts):
    by_count = True


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Counts, "output by 1.0e-05"), (CountsTwice, "attribute .count is 4, eager's is 2")],
)
def test_what_differs_is_found(
    kind: type[nn.Module], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from plain_checks import checked
    from plain_kinds.registry import PLAIN, floats, plain

    monkeypatch.setattr("plain_checks.PLAIN", registered := dict(PLAIN))
    monkeypatch.setattr("plain_kinds.registry.PLAIN", registered)
    plain(x=floats(3, 4))(kind)
    outcome = checked(kind.__name__, ("train",))
    assert outcome.states == {"train": "wrong"}
    assert reason in outcome.reasons["train"]


@on_fabric_rank
def check_rank() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    from plain_checks import zero3
    from plain_kinds import PLAIN

    for name in ON_RANKS:
        zero3(PLAIN[name], int(os.environ["RANK"]))


def test_two_ranks_have_the_means_of_eagers_gradients() -> None:
    run_on_fabric_ranks(check_rank, 2)
