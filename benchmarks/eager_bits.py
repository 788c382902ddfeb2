"""Compares steps with eager's: bits and times of ten architectures, and the peaks that are planned.

    python benchmarks/eager_bits.py [--only llama mamba] [--save]

Models are those of `toy_architectures.py`, without dropout. For each, eager and the compiled module take steps
in turn, and medians of the CPU time of the process on one thread are compared; the first step includes capture and
compilation. `bits` counts the gradients that equal eager's bit by bit. Peaks are those that the plan counts when it
keeps all.
`--save` writes the table into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from architecture_checks import eager, loss_of
from beside_eager import relative
from lightning.fabric import Fabric
from torch import Tensor, nn
from toy_architectures import Batch

from thunder_memsave.strategy import ThunderMemsaveStrategy

NAMES = (
    *("llama", "gpt2", "qwen3_moe", "gpt_oss", "mamba"),
    *("BERT (masked)", "T5", "Whisper", "ViT", "Swin"),
)
RESULTS = Path(__file__).parent / "results"
REPEATS, WARM_STEPS = 21, 2


@dataclass
class Trained:
    """A model, and what its steps left."""

    model: Callable[..., object]
    parameters: Sequence[nn.Parameter]
    strategy: ThunderMemsaveStrategy | None = None
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: Batch) -> list[Tensor | None]:
        """Take a step, keep its time, and return the gradients."""
        for p in self.parameters:
            p.grad = None
        start = time.process_time()
        loss_of(self.model(**batch)).backward()
        self.seconds.append(time.process_time() - start)
        return [p.grad for p in self.parameters]

    @property
    def steady_ms(self) -> float:
        """The median after the first steps."""
        return 1e3 * median(self.seconds[1 + WARM_STEPS :])


def main() -> None:
    """Measure, print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", default=NAMES)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "| model | bits | largest difference | first step, s | step, ms | / eager | peak, KiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    print(*lines, sep="\n")
    for name in arguments.only:
        lines.append(_row(name))
        print(lines[-1], flush=True)
    if arguments.save:
        _save(lines)


def _row(name: str) -> str:
    """Measure an architecture."""
    (model, make_batch), _ = eager(name)
    batch = make_batch(1)
    of_eager = Trained(model, list(model.parameters()))
    ours = _set_up(copy.deepcopy(model))
    expected, found = of_eager.step(batch), ours.step(batch)
    for _ in range(WARM_STEPS + REPEATS):
        for trained in (ours, of_eager):
            trained.step(batch)
    pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None]
    num_equal = sum(b is not None and torch.equal(a, b) for a, b in pairs)
    worst = max(relative(a, b) for a, b in pairs if b is not None)
    ratio = ours.steady_ms / of_eager.steady_ms
    assert ours.strategy is not None
    plan = ours.strategy.plan
    assert plan is not None
    return (
        f"| {name} | {num_equal} of {len(pairs)} | {worst:.1e} | {ours.seconds[0]:.2f} | {ours.steady_ms:.2f} | "
        f"{ratio:.2f} | {plan.predicted_peak_bytes / 1024:,.0f} |"
    )


def _set_up(model: nn.Module) -> Trained:
    strategy = ThunderMemsaveStrategy(memory={"policy": "keep_all"}, fullgraph=True)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    return Trained(fabric.setup(model), list(model.parameters()), strategy)


def _save(lines: Sequence[str]) -> None:
    versions = ", ".join(
        f"{n} {version(n)}" for n in ("torch", "lightning-thunder", "transformers")
    )
    text = (
        "# Bits, times and peaks beside eager\n\n"
        f"`python benchmarks/eager_bits.py --save`, {date.today()}, one thread of a {platform.machine()} CPU that "
        "other "
        f"processes used too, Python {platform.python_version()}, {versions}; float32, dropout 0, toy sizes. Medians "
        f"of the CPU time of {REPEATS} steps each, in turn.\n\n"
    )
    (RESULTS / f"eager_bits_{date.today()}_cpu.md").write_text(text + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
