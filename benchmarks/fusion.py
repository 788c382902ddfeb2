"""Time and memory of a training step with fusion against without, torch.compile and eager, in turn on one CPU thread.

    PYTHONPATH=tests python benchmarks/fusion.py [--repeats 41] [--ways unfused fused] [--save]

Steps alternate, and medians of the CPU time of the process are compared, which does not count while others run.
`--save` writes the table into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# First: PyTorch 2.13 lacks methods that Thunder asks for, and this package adds them.
from thunder_memsave.strategy import ThunderMemsaveStrategy  # isort: skip

import torch
import transformers
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.memory import measured_peak_bytes

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 256
SIZES = {
    "6 layers, d=128, s=128, b=2": (6, 128, 128, 2),
    "4 layers, d=256, s=256, b=4": (4, 256, 256, 4),
}
"""Layers, hidden size, tokens of a row, rows."""
SMALL = "fused, 0.75 of torch.compile's memory"
WAYS = ("unfused", "fused", "torch.compile", SMALL, "eager")
"""Each is measured with those before it. The memory is that beside parameters and gradients."""


@dataclass(frozen=True, slots=True)
class Step:
    """Forward and backward of a model that has no gradients before."""

    run: Callable[[], None]
    model: nn.Module

    def __call__(self) -> None:
        """Take the step."""
        self.model.zero_grad(set_to_none=True)
        self.run()

    def peak_bytes(self) -> int:
        """Return the step's peak beside what it finds; its gradients are part of it."""
        # Before it: what is freed while memory is measured counts or not, by chance.
        self.model.zero_grad(set_to_none=True)
        return measured_peak_bytes(self.run)


def model_of(layers: int, width: int, length: int) -> nn.Module:
    """Make a Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=length,
        use_cache=False,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


def step_of(
    way: str, model: nn.Module, batch: Tensor, *, saved_bytes: Callable[[], int] = lambda: 0
) -> Step:
    """Return a forward and backward of the model, in one of `WAYS`; `SMALL` saves bytes of the fused step's peak."""
    model = copy.deepcopy(model)
    called = model
    if way == "torch.compile":
        called = torch.compile(model)  # type: ignore[assignment]
    elif way == SMALL:
        fused = compiled(copy.deepcopy(model), fusion=True)
        fused(input_ids=batch, labels=batch)
        peak_bytes = fused._forward_module.planner.calls[-1].profile.peak_bytes
        called = compiled(model, fusion=True, memory={"budget": peak_bytes - saved_bytes()})
    elif way != "eager":
        called = compiled(model, fusion=way == "fused")

    def step() -> None:
        called(input_ids=batch, labels=batch)[0].backward()

    return Step(step, model)


def compiled(model: nn.Module, **settings: Any) -> Any:
    """Set the model up with our strategy."""
    strategy = ThunderMemsaveStrategy(sharding="none", **settings)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    return fabric.setup_module(model)


def rows(size: tuple[int, int, int, int], ways: Sequence[str], repeats: int) -> list[str]:
    """Measure one size; return a row for each way."""
    layers, width, length, num_rows = size
    model = model_of(layers, width, length)
    batch = torch.randint(VOCABULARY, (num_rows, length))
    steps, first = dict[str, Step](), {}

    def saved_bytes() -> int:
        fused, other = (steps[way].peak_bytes() for way in ("fused", "torch.compile"))
        gradients = sum(p.nbytes for p in model.parameters())
        return fused - int(0.75 * (other - gradients)) - gradients

    for way in ways:
        steps[way] = step_of(way, model, batch, saved_bytes=saved_bytes)
        start = time.perf_counter()
        steps[way]()
        first[way] = time.perf_counter() - start
        steps[way]()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, step in steps.items():
            start = time.process_time()
            step()
            times[way].append(1e3 * (time.process_time() - start))
    found = []
    for way in ways:
        ratios = [a / b for a, b in zip(times[way], times["unfused"], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        found.append(
            f"{way} | {median(times[way]):.2f} | {middle:.3f} | {low:.3f} to {high:.3f} | "
            f"{steps[way].peak_bytes():,} | {first[way]:.1f} |"
        )
    return found


def main() -> None:
    """Print the table, and save it where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "# Steps with fusion",
        "",
        f"`python benchmarks/fusion.py --save`, {date.today().isoformat()}, one thread of a {platform.machine()} CPU "
        f"that other processes used too, torch {version('torch')}, transformers {version('transformers')}; a Llama in "
        f"float32, forward and backward, medians of the CPU time of {options.repeats} steps each, in turn. The peak is "
        "beside weights, the step's gradients among it. First step: with capture, plan and compilation; how "
        "many kernels were on disk is not controlled.",
        "",
        "| model | step | ms | of unfused | middle half | peak, bytes | first step, s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, size in SIZES.items():
        for row in rows(
            size, ("unfused", *(w for w in options.ways if w != "unfused")), options.repeats
        ):
            lines.append(f"| {name} | {row}")
            print(lines[-1], flush=True)
    if options.save:
        path = RESULTS / f"fusion_{date.today().isoformat()}_cpu.md"
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
