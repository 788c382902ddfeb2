r"""Time and peak memory of the loss of a large vocabulary, forward and backward: ours beside PyTorch's ways.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python benchmarks/linear_cross_entropy.py \
      --tokens 1024 --classes 32000 --width 512

`plain` is `cross_entropy(linear(...))`; `torch` is `torch.nn.functional.linear_cross_entropy` in chunks (2.13);
`checkpointed` takes chunks of tokens, each in `torch.utils.checkpoint`, as TRL's chunked loss does: no line of it is
TRL's; `in_forward` differentiates each chunk in forward, by a chunk of Liger's size, and writes the gradient over the
logits: Liger's formulation in PyTorch's operators, no line of it is Liger's. All run in one process by turns, once all
are found to have the same loss and gradients; the table has medians, and the bytes allocated at the peak beyond the
operands.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

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


class InForward(torch.autograd.Function):
    """The mean loss, whose gradients are computed in forward and kept; backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `hidden` [tokens, width], `weight` [classes, width] and `targets` [tokens]."""
        num_kept = (targets != -100).sum()
        loss = hidden.new_zeros(())
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        size = _liger_chunk(len(hidden), *weight.shape)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = hidden[rows] @ weight.t()
            loss += _to_gradient(logits, targets[rows])
            logits /= num_kept
            torch.mm(logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), hidden[rows])
            del logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss / num_kept

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients, scaled in place unless the loss's own is 1."""
        found = ctx.saved_tensors
        if grads[0] != 1:
            found = [None if g is None else g.mul_(grads[0]) for g in found]
        return (*found, None)


def _liger_chunk(num_tokens: int, num_classes: int, width: int) -> int:
    """Return the power of two of tokens whose logits are about as large as all hidden states."""
    tokens = math.ceil(num_tokens / math.ceil(num_classes / width))
    return min(num_tokens, 1 << (tokens - 1).bit_length())


def _to_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """Write the gradient of the summed loss over the logits; return that loss."""
    kept = targets != -100
    at = targets.where(kept, 0)[:, None]
    logits -= logits.amax(-1, keepdim=True)
    of_target = logits.gather(-1, at)
    total = logits.exp_().sum(-1, keepdim=True)
    logits /= total
    logits.scatter_add_(-1, at, -torch.ones_like(of_target))
    logits *= kept[:, None]
    return ((total.log() - of_target) * kept[:, None]).sum()


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
        "in_forward": lambda h, t: InForward.apply(h, head.weight, t),  # type: ignore[no-untyped-call]
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


def _check(losses: Mapping[str, Loss], head: Head, hidden: Tensor, targets: Tensor) -> None:
    """Compare the loss and the gradients of all ways with those of `plain`; this is also each one's first step."""
    wanted: list[Tensor] = []
    for name, loss in losses.items():
        hidden.grad = head.weight.grad = None
        value = loss(hidden, targets)
        value.backward()
        found = [t for t in (value.detach(), hidden.grad, head.weight.grad) if t is not None]
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            error = ((one - other).norm() / other.norm()).item()
            if not error <= 1e-5:  # float32, sums in another order
                raise SystemExit(
                    f"`{name}` differs from `plain` by {error:.1e}; nothing is measured"
                )


def _measure(
    losses: Mapping[str, Loss], head: Head, hidden: Tensor, targets: Tensor, ignored: float
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in losses}

    def step(loss: Loss) -> None:
        hidden.grad = head.weight.grad = None
        loss(hidden, targets).backward()

    _check(losses, head, hidden, targets)
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
