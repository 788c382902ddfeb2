"""Steady time of a training step (forward and backward) of ours against eager's, for the models of `architectures.py`.

    make architecture-steps                                          # all, at two widths: hours
    python benchmarks/architecture_steps.py --scales 8 --only llama T5 --save steps.md

Each model runs in a process of its own on one CPU thread; steps alternate (ours, eager, ours, ...), and medians of the
CPU time of the process are compared, which does not count while others run. Scale 1 is a hidden size of 32 and 2 rows
of 16 tokens, scale 8 one of 256 and 2 rows of 128. What is in the JSON file already is not run again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
import transformers
from architecture_checks import eager, loss_of
from beside_eager import launched, without_paths
from forked import Fields, results
from torch import nn
from toy_architectures import CAUSAL, OTHERS, Batch

from thunder_memsave.strategy import ThunderMemsaveStrategy

MOST_TIMES_EAGER = {1: 1.5, 8: 1.1}
"""By the scale: the most that a step may take, as a part of eager's."""
WARM_STEPS = 4
LEAST_STEPS, MOST_STEPS, LIMIT_S = 9, 41, 8.0


@dataclass(kw_only=True)
class Row:
    """The steps of one model at one scale."""

    name: str
    scale: int
    fusion: bool
    ours_ms: float = 0.0
    eager_ms: float = 0.0
    num_steps: int = 0
    first_s: float = 0.0
    """Seconds of the first step of ours."""
    reason: str = ""
    """Why nothing was measured."""

    @property
    def times_eager(self) -> float:
        """Return the time of our step as a part of eager's."""
        return self.ours_ms / self.eager_ms


def measured(scale: int, fusion: bool, name: str) -> Fields:
    """Take steps of both by turns."""
    torch.set_num_threads(1)
    row = Row(name=name, scale=scale, fusion=fusion)
    try:
        (model, batch), _ = eager(name, scale=scale)
        strategy = ThunderMemsaveStrategy(fusion=fusion)
        steps = (
            _step(launched(strategy).setup(copy.deepcopy(model)), batch(1)),
            _step(model, batch(1)),
        )
        start = time.monotonic()
        steps[0]()
        row.first_s = round(time.monotonic() - start, 1)
        for step in steps * WARM_STEPS:
            step()
        gc.collect()
        ours, theirs = _seconds(steps)
    except Exception as error:
        row.reason = without_paths(f"{type(error).__name__}: {error}")[:300]
    else:
        row.ours_ms, row.eager_ms = 1e3 * median(ours), 1e3 * median(theirs)
        row.num_steps = len(ours)
    return asdict(row)


def _step(model: nn.Module, batch: Batch) -> Callable[[], None]:
    parameters = list(model.parameters())

    def step() -> None:
        loss_of(model(**batch)).backward()
        for p in parameters:
            p.grad = None

    return step


def _seconds(steps: Sequence[Callable[[], None]]) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = ([], [])
    end = time.monotonic() + LIMIT_S
    while len(found[1]) < LEAST_STEPS or (len(found[1]) < MOST_STEPS and time.monotonic() < end):
        for step, seconds in zip(steps, found, strict=True):
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown: a line for each scale, and the slowest models of each."""
    packages = ", ".join(
        f"{p} {version(p)}" for p in ("torch", "transformers", "lightning-thunder")
    )
    lines = [f"{packages}, one CPU thread.", ""]
    for scale, fusion in sorted({(r.scale, r.fusion) for r in rows}):
        here = [r for r in rows if (r.scale, r.fusion) == (scale, fusion)]
        run = sorted((r for r in here if not r.reason), key=lambda r: -r.times_eager)
        if not run:
            continue
        most = MOST_TIMES_EAGER.get(scale, 1.0)
        above = [r for r in run if r.times_eager > most]
        lines += [
            f"## Hidden size {32 * scale}, 2 rows of {16 * scale} tokens, fusion {'on' if fusion else 'off'}",
            "",
            f"{len(run)} models: in the median {median(r.times_eager for r in run):.2f} of eager's step, at most "
            f"{run[0].times_eager:.2f}; above {most}: {len(above)}. "
            f"{len(here) - len(run)} others were not measured.",
            "",
            "| model | ours, ms | eager, ms | ours / eager | first step, s |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {r.name} | {r.ours_ms:.2f} | {r.eager_ms:.2f} | {r.times_eager:.2f} | {r.first_s} |"
                for r in run
            ),
            "",
            *(f"- {r.name}: {r.reason}" for r in sorted(here, key=lambda r: r.name) if r.reason),
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    """Measure what was not measured yet, and write the table after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", help="names of architectures; all by default")
    parser.add_argument("--scales", nargs="*", type=int, default=list(MOST_TIMES_EAGER))
    parser.add_argument("--fusion", action="store_true", help="with regions compiled by inductor")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--save", type=Path, help="a Markdown file; a JSON file is kept beside it")
    arguments = parser.parse_args()
    names = arguments.only or [*OTHERS, *CAUSAL]
    if unknown := sorted(set(names) - {*CAUSAL, *OTHERS}):
        print(
            f"there is no {', '.join(unknown)} among {', '.join(OTHERS)} and transformers' causal models"
        )
        return 2
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    kept = arguments.save and arguments.save.with_suffix(".json")
    rows = [Row(**r) for r in json.loads(kept.read_text())] if kept and kept.exists() else []
    for scale in arguments.scales:
        done = {r.name for r in rows if (r.scale, r.fusion) == (scale, arguments.fusion)}
        run = partial(measured, scale, arguments.fusion)
        without = partial(_without, scale, arguments.fusion)
        left = [n for n in names if n not in done]
        for fields in results(left, run, workers=arguments.workers, without=without):
            rows.append(row := Row(**fields))
            print(f"{row.name} {32 * scale}:", row.reason or f"{row.times_eager:.2f}", flush=True)
            if kept:
                kept.write_text(json.dumps([asdict(r) for r in rows], indent=1))
                arguments.save.write_text(table(rows))
    if not arguments.save:
        print(table(rows))
    return 0


def _without(
    scale: int, fusion: bool, name: str, is_late: bool, reason: str, seconds: float
) -> Fields:
    return asdict(Row(name=name, scale=scale, fusion=fusion, reason=reason))


if __name__ == "__main__":
    sys.exit(main())
