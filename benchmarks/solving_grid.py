"""Measures how long plans take to be solved, and how far from the bound they are, for whole run files and many budgets.

    PYTHONPATH=.typing OMP_NUM_THREADS=1 python benchmarks/solving_grid.py llama3_8b_lora llama3_70b_lora

Each run is captured and lowered as `plan` does, for 64 H200 under zero3 and rows of 8,192 tokens; then each budget is
solved anew. Time is CPU time of the solver. The gap is (step - bound) / step: the step's time under the plan, and the
least that any plan can take, at the device's rates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from thunder_memsave.budget.plan_request import Question
from thunder_memsave.collector import collector
from thunder_memsave.errors import BudgetError
from thunder_memsave.finetune.plan.plan_run import plan_run
from thunder_memsave.finetune.plan.run_planner import RunPlanner
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Plan

CONFIGS = Path(__file__).parents[1] / "configs"
PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
OFFLOADS = ("none", "activations")


@dataclass(frozen=True)
class Solved:
    """A budget's plan; None: there is none."""

    part: float
    budget_bytes: int
    plan: Plan | None
    seconds: float
    step_us: float
    """Without anything recomputed."""

    @property
    def gap(self) -> float:
        """How much longer than necessary the step may take."""
        assert self.plan is not None
        us = self.step_us + self.plan.added_us
        return max(us - self.step_us - self.plan.lower_bound_us, 0.0) / us


def question_of(name: str, offload: str, options: argparse.Namespace) -> Question:
    """Return what the planner of a run file is asked."""
    words = [
        f"--data.max_seq_length={options.length}",
        "--strategy.sharding=zero3",
        f"--train.global_batch_size={options.ranks}",
        "--train.micro_batch_size=1",
        f"--memory.offload={offload}",
        *(f"--{each}" for each in options.set),
    ]
    asked: list[Question] = []

    def keep(self: RunPlanner, *, counts_tiles: bool) -> int:
        asked.append(self._last)
        return 0

    with patch.object(RunPlanner, "smallest_bytes", keep), collector(runs=False):
        config = load_run_config(CONFIGS / f"{name}.yaml", words)
        plan_run(config, device=device("h200"), num_ranks=options.ranks, has_curve=False)
    return asked[-1]


def solved(question: Question, parts: tuple[float, ...]) -> Iterator[Solved]:
    """Solve budgets that are parts of the peak with all kept."""
    whole = question.solved(None).keep_all_peak_bytes
    step_us = sum(question.costs_us)
    for part in parts:
        budget_bytes, start = int(part * whole), time.process_time()
        try:
            plan: Plan | None = question.solved(budget_bytes)
        except BudgetError:
            plan = None
        yield Solved(part, budget_bytes, plan, time.process_time() - start, step_us)


def row(name: str, offload: str, each: Solved) -> str:
    """Return a row of the table."""
    budget = f"{each.part:.0%}, {each.budget_bytes / 2**30:.1f} GiB"
    if each.plan is None:
        return f"| {name} | {offload} | {budget} | no plan | | | {each.seconds:.1f} |"
    added = each.plan.added_us / each.step_us
    copied = each.plan.offloaded_bytes / 2**30
    return f"| {name} | {offload} | {budget} | {added:.1%} | {copied:.1f} | {each.gap:.2%} | {each.seconds:.1f} |"


def main() -> None:
    """Print the table while it is made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", help="run files of configs/")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a row")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--offload", nargs="+", default=OFFLOADS, choices=OFFLOADS)
    parser.add_argument("--set", nargs="*", default=[], help="other keys, as key=value")
    parser.add_argument("--save", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    lines = [
        "| run file | offload | budget | step longer by | GiB copied | gap | s |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for name in options.names:
        for offload in options.offload:
            for each in solved(question_of(name, offload, options), PARTS):
                lines.append(row(name, offload, each))
                print(lines[-1], flush=True)
                if options.save is not None:
                    options.save.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
