"""One process of `ranks.py`: `torchrun -m gpu.rank_steps train`, `overlap`, `hang` or `oom`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from gpu.checks import Target
from gpu.models import Shape, llama
from thunder_memsave.strategy import ThunderMemsaveStrategy

ROWS, LENGTH, STEPS, TIMED = 8, 128, 3, 5
SHAPE = Shape(name="ranks", layers=8, hidden=2048, wide=8192, heads=16, key_heads=4)


class Training:
    """A model, set up by Fabric, and the rows of this rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        ranks = int(os.environ["WORLD_SIZE"])
        settings: dict[str, Any] = {"sharding": arguments.sharding, "prefetch": arguments.prefetch}
        if arguments.timeout:
            settings["timeout"] = f"{arguments.timeout}s"
        strategy = ThunderMemsaveStrategy(**settings)
        self.target = Target(arguments.device)
        self.fabric = Fabric(accelerator=arguments.device, devices=ranks, strategy=strategy)
        self.fabric.launch()
        model = llama(SHAPE, self.target, length=LENGTH, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 512, (STEPS + TIMED, ROWS, LENGTH), generator=generator)
        own = slice(self.fabric.global_rank, None, ranks)
        self.batches = ids[:, own].to(self.fabric.device)

    def step(self, number: int) -> tuple[float, float]:
        """Train on one batch; return the loss and the norm of the gradients of all ranks."""
        ids = self.batches[number]
        loss = self.model(input_ids=ids, labels=ids).loss
        self.fabric.backward(loss)
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1e9)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = self.fabric.all_reduce(loss.detach(), reduce_op="mean")
        assert isinstance(mean, Tensor)
        assert norm is not None
        return float(mean), float(norm)


def train(training: Training, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return losses and norms of some steps."""
    found = [training.step(number) for number in range(STEPS)]
    return {"losses": [loss for loss, _ in found], "norms": [norm for _, norm in found]}


def overlap(training: Training, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the hidden part of nccl's kernels in a step, and the milliseconds of one."""
    for number in range(STEPS):
        training.step(number)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(STEPS, STEPS + TIMED):
        training.step(number)
    torch.cuda.synchronize()
    ms = 1e3 * (time.perf_counter() - start) / TIMED
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        training.step(0)
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [("nccl" in e.name, e.time_range.start, e.time_range.end) for e in kernels]
    return {"hidden": hidden_part(spans), "ms": ms}


def hidden_part(spans: Sequence[tuple[bool, float, float]]) -> float:
    """Return the part of the time of communication in which something else runs.

    Args:
        spans: `(is communication, start, end)` of each kernel, in any unit.
    """
    computes = sorted((start, end) for is_sent, start, end in spans if not is_sent)
    total = hidden = 0.0
    for is_sent, start, end in spans:
        if not is_sent:
            continue
        total += end - start
        at = start
        for other_start, other_end in computes:
            low, high = max(at, other_start), min(end, other_end)
            if high > low:
                hidden, at = hidden + high - low, high
    return hidden / total if total else 0.0


def hang(training: Training, arguments: argparse.Namespace) -> dict[str, Any]:
    """Stop the last rank for good after a step."""
    training.step(0)
    if training.fabric.global_rank == training.fabric.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    training.step(1)
    return {}


def oom(training: Training, arguments: argparse.Namespace) -> dict[str, Any]:
    """Leave the last rank too little memory after a step."""
    training.step(0)
    if training.fabric.global_rank == training.fabric.world_size - 1:
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(reserved / total)
    training.step(1)
    return {}


CASES: dict[str, Callable[[Training, argparse.Namespace], dict[str, Any]]] = {
    "train": train,
    "overlap": overlap,
    "hang": hang,
    "oom": oom,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sharding", default="zero2")
    parser.add_argument("--prefetch", default="auto")
    parser.add_argument("--timeout", type=int, default=0)
    arguments = parser.parse_args()
    training = Training(arguments)
    found = CASES[arguments.case](training, arguments)
    if training.fabric.global_rank == 0:
        arguments.output.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
