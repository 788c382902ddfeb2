r"""Time and peak memory of the loss of a large vocabulary, forward and backward: ours beside PyTorch's ways.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python benchmarks/linear_cross_entropy.py \
      --tokens 1024 --classes 32000 --width 512

`plain` is `cross_entropy(linear(...))`; `torch` is `torch.nn.functional.linear_cross_entropy` in chunks (2.13);
`checkpointed` takes chunks of tokens, each in `torch.utils.checkpoint`, as TRL's chunked loss does: no line of it is
TRL's. All run in one process by turns; the table has medians, and the bytes allocated at the peak beyond the operands.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from statistics import median

# First: PyTorch 2.13 lacks methods that Thunder asks for, and this package adds them.
from thunder_memsave.compiler.compiled_module import CompiledModule  # isort: skip

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.memory import measured_peak_bytes

_CHUNK = 256
_NUM_RUNS = 5

Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A linear layer and its loss, as a user writes it."""

    def __init__(self, width: int, num_classes: int, *, is_trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_classes, width) * 0.02, is_trained)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        return F.cross_entropy(F.linear(hidden, self.weight).float(), targets)


def ways(head: Head) -> Mapping[str, Loss]:
    """Return the ways to compute the same loss."""

    def in_chunks(hidden: Tensor, targets: Tensor) -> Tensor:
        def of_chunk(part: Tensor, targets: Tensor) -> Tensor:
            logits = F.linear(part, head.weight).float()
            return F.cross_entropy(logits, targets, reduction="sum")

        parts = zip(hidden.split(_CHUNK), targets.split(_CHUNK), strict=True)
        losses = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / (targets != -100).sum()

    found: dict[str, Loss] = {
        "plain": head,
        "ours": CompiledModule(head),
        "checkpointed": in_chunks,
    }
    if hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        found["torch"] = lambda h, t: F.linear_cross_entropy(h, head.weight, t, options=options)
    return found


def main() -> None:
    """Print a row for each way and share of ignored targets."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would write lines between
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("tokens", 1024), ("classes", 32_000), ("width", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--frozen", action="store_true", help="the head is not trained")
    given = parser.parse_args()
    torch.manual_seed(0)
    head = Head(given.width, given.classes, is_trained=not given.frozen)
    hidden = torch.randn(given.tokens, given.width, requires_grad=True)
    kind = "frozen" if given.frozen else "trained"
    print(f"{given.tokens} tokens, {given.classes} classes, width {given.width}, float32, {kind}")
    print(f"{'ignored':>8} {'way':>14} {'ms':>9} {'of plain':>9} {'peak MiB':>9}")
    for ignored in (0.0, 0.3):
        targets = torch.randint(0, given.classes, (given.tokens,))
        targets[torch.rand(given.tokens) < ignored] = -100
        _measure(ways(head), head, hidden, targets, ignored)


def _measure(
    losses: Mapping[str, Loss], head: Head, hidden: Tensor, targets: Tensor, ignored: float
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in losses}

    def step(loss: Loss) -> None:
        hidden.grad = head.weight.grad = None
        loss(hidden, targets).backward()

    for loss in losses.values():
        step(loss)
    for _ in range(_NUM_RUNS):
        for name, loss in losses.items():
            start = time.perf_counter()
            step(loss)
            seconds[name].append(time.perf_counter() - start)
    plain = median(seconds["plain"])
    for name, loss in losses.items():
        hidden.grad = head.weight.grad = None
        mib = measured_peak_bytes(lambda loss=loss: step(loss)) / 2**20  # type: ignore[misc]
        ms = median(seconds[name]) * 1e3
        print(f"{ignored:8.0%} {name:>14} {ms:9.0f} {ms / plain / 1e3:9.2f} {mib:9.1f}")


if __name__ == "__main__":
    main()
