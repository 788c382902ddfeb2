"""The longest row is found in few plans, each of which is real; positions end it, and a budget is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.plan.longest_row import LongestRow, longest_row
from thunder_memsave.settings.problems import ConfigError

GIB = 2**30


class Machine:
    """Plans of a model whose bytes are `constant + per_token * tokens + bend * tokens^2`."""

    def __init__(
        self, *, constant: int, per_token: float, bend: float = 0.0, lost: float = 0.0
    ) -> None:
        self.constant, self.per_token, self.bend, self.lost = constant, per_token, bend, lost
        self.tried: list[int] = []

    def needs(self, num_tokens: int) -> int:
        return int(self.constant + self.per_token * num_tokens + self.bend * num_tokens**2)

    def plan(self, num_tokens: int) -> Any:
        self.tried.append(num_tokens)
        smallest_bytes, budget_bytes = self.needs(num_tokens), 80 * GIB
        fits = smallest_bytes * (1 + self.lost) <= budget_bytes
        by_kind = {"parameter": self.constant, "activation": smallest_bytes - self.constant}
        call = SimpleNamespace(profile=SimpleNamespace(peak_bytes_by_kind=by_kind))
        return SimpleNamespace(
            fits=fits, smallest_bytes=smallest_bytes, budget_bytes=budget_bytes, call=call
        )

    def search(self, *, start: int = 2048, most: int | None = None) -> LongestRow:
        return longest_row(self.plan, start=start, most=most, say=lambda text: None)


@pytest.mark.parametrize("start", [64, 2048, 500_000])
@pytest.mark.parametrize(
    "machine",
    [
        {"constant": 16 * GIB, "per_token": 4e5},
        {"constant": 70 * GIB, "per_token": 4e6},
        {"constant": GIB, "per_token": 4e5, "bend": 2.0},
        {"constant": 16 * GIB, "per_token": 4e5, "lost": 0.05},
    ],
    ids=str,
)
def test_it_is_within_a_few_percent_in_few_plans(machine: dict[str, Any], start: int) -> None:
    made = Machine(**machine)
    found = made.search(start=start)
    assert found.made.fits
    assert made.needs(int(found.num_tokens * 1.05) + 64) * (1 + made.lost) > 80 * GIB
    assert len(made.tried) == len(set(made.tried)) <= 8
    assert f"{found.num_tokens:,} tokens" in found.sentence


def test_positions_end_it() -> None:
    found = Machine(constant=16 * GIB, per_token=1e5).search(most=131_072)
    assert found.num_tokens == 131_072
    assert "positions end (max_position_embeddings), before the memory does" in found.sentence


def test_nothing_may_fit() -> None:
    found = Machine(constant=90 * GIB, per_token=1e5).search()
    assert not found.made.fits
    assert found.sentence.startswith("no row fits")


def test_it_needs_a_budget() -> None:
    made = Machine(constant=GIB, per_token=1e5)
    plan = made.plan

    def without(num_tokens: int) -> Any:
        found = plan(num_tokens)
        found.budget_bytes = None
        return found

    with pytest.raises(ConfigError, match="--longest needs a budget"):
        longest_row(without, start=64, most=None, say=lambda text: None)


def test_the_command_plans_the_row_that_it_names(
    run_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", run_file, "--longest", "--device=cpu", "--budget=1GiB"])
    output, progress = capsys.readouterr()
    assert code == 0
    assert output.startswith("the longest row that fits has 64 tokens: there the model's positions")
    assert "2 rows of 64 tokens each" in output
    assert "a row of 64 tokens fits: at least" in progress
