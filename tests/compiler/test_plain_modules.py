"""Some of the small modules of `benchmarks/plain`: numbers, buffers and attributes are eager's, on two ranks too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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
ON_RANKS = ("CheckpointedDropout", "CopiedPiece", "VmappedPiece")


@pytest.mark.parametrize("name", ALONE)
def test_two_steps_and_evaluation_are_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from plain_checks import checked

    outcome = checked(name, ("train", "evaluate"))
    assert outcome.runs, outcome


@on_fabric_rank
def check_rank() -> None:
    sys.path.insert(0, str(BENCHMARKS))
    from plain import PLAIN
    from plain_checks import zero3

    for name in ON_RANKS:
        zero3(PLAIN[name], int(os.environ["RANK"]))


def test_two_ranks_have_the_means_of_eagers_gradients() -> None:
    run_on_fabric_ranks(check_rank, 2)
