"""Compares steps that recompute with steps that store activations in fp8, within the same budget, on the CPU.

    PYTHONPATH=.typing:tests python benchmarks/compressed_activations.py [--repeats 25] [--save]

A Llama of 4 layers in float32, one thread. A CPU is no GPU: PyTorch converts to fp8 and back slowly there. Each budget
is a part of the way from the smallest one to that of keeping all. The steps of all plans are interleaved; times are
medians, gradients are compared with those of keeping all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from lightning.fabric import Fabric
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gpu.models import smallest_bytes
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.planner.graph import COMPRESS

RESULTS = Path(__file__).parent / "results"
WIDTH, LAYERS, ROWS, LENGTH, WORDS = 512, 4, 4, 256, 1024
PARTS = (0.05, 0.15, 0.3)


@dataclass(frozen=True, slots=True)
class Setting:
    """One set-up model."""

    step: Callable[[], list[Tensor]]
    """Takes a forward and a backward, and returns the gradients."""
    call: PlannedCall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--save", action="store_true", help="write into benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = list(report(options.repeats))
    if options.save:
        today = datetime.now(UTC).date()
        path = RESULTS / f"compressed_activations_{today}_cpu.md"
        path.write_text("\n".join(lines) + "\n")
        print(f"written: {path}")


def report(repeats: int) -> Iterator[str]:
    """Print and yield the lines of the table."""

    def say(line: str) -> str:
        print(line, flush=True)
        return line

    kept = made(policy="keep_all")
    exact = kept.step()
    kept_bytes = kept.call.profile.peak_bytes
    least_bytes = smallest_bytes(lambda nbytes: made(budget=nbytes))
    yield say(
        f"torch {torch.__version__}, transformers {transformers.__version__}, one thread: a Llama of {LAYERS} layers, "
        f"{WIDTH} features, {ROWS} x {LENGTH} tokens, float32."
    )
    yield say(f"All kept: {kept_bytes / 2**20:.1f} MiB; smallest: {least_bytes / 2**20:.1f} MiB.")
    yield say("")
    yield say("| peak, MiB | plan | step, ms | more than all kept | stored | error of gradients |")
    yield say("|---:|---|---:|---:|---:|---:|")
    for part in PARTS:
        budget = int(least_bytes + part * (kept_bytes - least_bytes))
        settings = {
            "all kept": kept,
            "recompute": made(budget=budget),
            "fp8": made(budget=budget, compress="fp8"),
        }
        times = timed(settings, repeats)
        for name, setting in settings.items():
            error = max(map(relative_error, setting.step(), exact))
            more = times[name] / times["all kept"] - 1
            num_stored = sum(s.op.symbol == COMPRESS for s in setting.call.program.steps)
            yield say(
                f"| {setting.call.profile.peak_bytes / 2**20:.1f} | {name} | {times[name] * 1e3:.1f} | {more:+.1%} | "
                f"{num_stored} | {error:.4f} |"
            )


def made(**memory: Any) -> Setting:
    """Set a model up, and take its first step."""
    strategy = ThunderMemsaveStrategy(memory=memory)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            vocab_size=WORDS,
        )
    )
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    module = fabric.setup(model)

    def step() -> list[Tensor]:
        fabric.backward(module(input_ids=ids, labels=ids, use_cache=False).loss)
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        module.zero_grad()
        return gradients

    step()
    (compiled,) = strategy._modules
    assert compiled.planner is not None
    return Setting(step, compiled.planner.calls[-1])


def timed(settings: dict[str, Setting], repeats: int) -> dict[str, float]:
    """Return the median of each setting's steps, in seconds."""
    found: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(repeats):
        for name, setting in settings.items():
            start = time.perf_counter()
            setting.step()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def relative_error(mine: Tensor, exact: Tensor) -> float:
    return float((mine - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
