"""Compares the smallest block of memory with fixed offsets that is found to the peak of what it holds.

    PYTHONPATH=tests python benchmarks/arena.py --save benchmarks/results/arena.md

Twelve architectures, two layers each and rows of 4,096 tokens, are planned for an H200: with all kept, and within a
third of the way from the smallest budget to that. Counts alone; no device is needed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from harness.planned_models import MODELS, planned
from thunder_memsave.finetune.plan import run_planner
from thunder_memsave.planner.arena import lifetimes, plan_arena

HEAD = (
    "| model | budget | storages | peak | block | of the peak | ms |\n|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path, help="a Markdown file for the table")
    path = parser.parse_args().save
    torch.set_num_threads(1)
    run_planner._SMALLEST_S = 0.1  # the smallest budget is only where to look
    rows = []
    for name in MODELS:
        for row in rows_of(name):
            print(row, flush=True)
            rows.append(row)
    if path is not None:
        title = f"Fixed offsets, torch {torch.__version__}, planned for an H200 on a CPU."
        path.write_text("\n".join([title, "", HEAD, *rows, ""]))


def rows_of(name: str) -> Iterator[str]:
    keep_all = planned(name, None)
    least, most = keep_all.smallest_bytes, keep_all.call.profile.peak_bytes
    third = least + (most - least) // 3
    for label, plan in (("all kept", keep_all), ("a third", planned(name, int(1.08 * third)))):
        found = lifetimes(plan.call.program)
        start = time.perf_counter()
        arena = plan_arena(found)
        ms = 1e3 * (time.perf_counter() - start)
        sizes = (f"{n / 2**20:,.1f} MiB" for n in (arena.least_bytes, arena.nbytes))
        yield f"| {name} | {label} | {len(found)} | {' | '.join(sizes)} | {arena.ratio:.4f} | {ms:.0f} |"


if __name__ == "__main__":
    main()
