"""Runs ours where other projects have published numbers: a 1B under three budgets, LoRA on an 8B.

Published on an H100, whose memory is slower than an H200's, and not run here: the ratio is for orientation. A budget
without a plan is reported as such, with the smallest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from gpu.checks import Check, Measured, Target, WrongError
from gpu.models import (
    LLAMA_1B,
    Ours,
    free,
    llama,
    llama_8b,
    ours,
    synchronized_s,
    token_ids,
    with_lora,
)
from gpu.speed import Work
from thunder_memsave.errors import BudgetError

REPEATS = 7
_GB = 10**9
_LORA_TOKENS_PER_S = 12_473
"""NeMo Automodel 0.5, docs/performance-summary.mdx: Llama 3 8B, LoRA in bfloat16, 2 rows of 4,096 tokens, one H100."""


@dataclass(frozen=True)
class Published:
    """A point of torchtitan (pull request 4636): Llama 3.2 1B, 4 rows of 2,048 tokens, one H100."""

    gigabytes: float
    seconds: float


POINTS = (Published(32.23, 0.288), Published(24.88, 0.309), Published(21.39, 0.331))


def under_budget(target: Target, *, point: Published) -> Measured:
    """Train the 1B in the bytes of a published point."""
    work = Work(shape=LLAMA_1B, rows=4, length=2048, mixed=True)
    model, ids = work.model(target)
    # On a CPU the model is tiny: its budget only has to be one.
    budget = int(point.gigabytes * _GB) if target.is_cuda else 10**9
    made = ours(model, ids, target, memory={"budget": budget}, precision=work.precision)
    numbers: dict[str, Any] = {"budget_bytes": budget, "published_s": point.seconds}
    try:
        seconds = _median_s(made, target)
    except BudgetError as error:
        numbers["smallest_bytes"] = error.smallest_bytes
        least = (
            "unknown" if error.smallest_bytes is None else f"{error.smallest_bytes / _GB:.2f} GB"
        )
        raise WrongError(f"no plan fits; the smallest budget is {least}", numbers) from error
    numbers |= {"seconds": seconds, "predicted_bytes": made.predicted_bytes, **_measured(target)}
    line = f"{seconds:.3f} s in {made.predicted_bytes / _GB:.2f} GB predicted"
    compared = f"published {point.seconds} s ({seconds / point.seconds:.2f} of it)"
    return Measured(line=f"{line}, {_only_on_cuda(compared, target)}", numbers=numbers)


def lora_8b(target: Target) -> Measured:
    """Train adapters of the whole 8B, an update after every micro-batch."""
    length = 4096 if target.is_cuda else 64
    model: Any = llama(llama_8b(32), target, length=length)
    ids = token_ids(model, target, rows=2, length=length)
    made = ours(with_lora(model), ids, target, precision="bf16-mixed")
    seconds = _median_s(made, target)
    rate = ids.numel() / seconds
    numbers = {
        "tokens_per_s": rate,
        "published_tokens_per_s": _LORA_TOKENS_PER_S,
        "seconds": seconds,
        **_measured(target),
    }
    line = f"{rate:,.0f} tokens/s with AdamW in every micro-batch"
    compared = f"published {_LORA_TOKENS_PER_S:,} ({rate / _LORA_TOKENS_PER_S:.2f} of it)"
    return Measured(line=f"{line}, {_only_on_cuda(compared, target)}", numbers=numbers)


def _only_on_cuda(compared: str, target: Target) -> str:
    return compared if target.is_cuda else "of a tiny model, comparable with nothing"


def _median_s(made: Ours, target: Target) -> float:
    for _ in range(2):
        made.step()
    free(target)
    seconds = []
    for _ in range(REPEATS if target.is_cuda else 1):
        start = synchronized_s(target)
        made.step()
        seconds.append(synchronized_s(target) - start)
    return median(seconds)


def _measured(target: Target) -> dict[str, int]:
    import torch

    if not target.is_cuda:
        return {}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

CHECKS = [
    *(
        Check(
            name=f"1B in {point.gigabytes} GB",
            run=partial(under_budget, point=point),
            limit_s=150,
            environment=_EXPANDABLE,
        )
        for point in POINTS
    ),
    Check(name="8B LoRA", run=lora_8b, limit_s=180, environment=_EXPANDABLE),
]
