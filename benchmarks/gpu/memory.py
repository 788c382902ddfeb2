"""Compares predicted with measured memory: 2 layers of Llama 3.1 8B, rows of 8,192 tokens, three budgets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from gpu.checks import Check, Measured, NotRunError, Target, WrongError
from gpu.models import (
    GIB,
    Ours,
    free,
    llama,
    llama_8b,
    ours,
    smallest_bytes,
    token_ids,
    with_lora,
)
from thunder_memsave.planner.caching_allocator.environment import NotSimulatedError
from thunder_memsave.planner.reserved import reserved_or_reason

LENGTH = 8192
LAYERS = 2
TRAINED = ("every weight", "LoRA")
LIMIT = 0.02
"""Of the predicted peak, by which the allocated bytes may differ from it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """The memory of a step under one budget; sizes are in bytes."""

    trained: str
    expandable: bool
    budget: str
    """Which of the three budgets."""
    budget_bytes: int | None
    predicted: int
    simulated_reserved: int | None
    allocated: int | None
    """`torch.cuda.max_memory_allocated` of a later step."""
    requested: int | None
    """The same without what is lost within blocks."""
    reserved: int | None
    outside: int | None
    """What the CUDA context and other programs hold."""
    num_retries: int | None

    @property
    def error(self) -> float:
        """Relative difference between allocated and predicted bytes, cuBLAS's among both."""
        assert self.allocated is not None
        return (self.allocated - self.predicted) / self.predicted

    @property
    def line(self) -> str:
        """The point in words."""
        assert self.allocated is not None
        assert self.reserved is not None
        allocated, reserved = (n / self.predicted - 1 for n in (self.allocated, self.reserved))
        return f"{self.budget} {self.predicted / GIB:.2f} GiB {allocated:+.1%} / reserved {reserved:+.1%}"


def predicted_and_measured(target: Target, *, trained: str, expandable: bool) -> Measured:
    """Measure a step under three budgets; raise if one is further from its prediction than the limit."""
    found = list(points(target, trained=trained, expandable=expandable))
    numbers = {"points": [asdict(p) for p in found]}
    if not target.is_cuda:
        raise NotRunError("needs CUDA: torch counts no bytes on this device")
    line = "; ".join(p.line for p in found)
    if max(abs(p.error) for p in found) > LIMIT:
        raise WrongError(f"more than {LIMIT:.0%} from the prediction: {line}", numbers)
    return Measured(line=line, numbers=numbers)


def points(target: Target, *, trained: str, expandable: bool) -> Iterator[Point]:
    """Yield the three points: everything kept, the smallest plan, and half way between."""
    kept = _point(target, "all kept", None, trained=trained, expandable=expandable)
    yield kept
    smallest = smallest_bytes(lambda n: _set_up(target, n, trained=trained).step())
    for name, nbytes in (("half way", (kept.predicted + smallest) // 2), ("smallest", smallest)):
        yield _point(target, name, nbytes, trained=trained, expandable=expandable)


def _set_up(target: Target, budget_bytes: int | None, *, trained: str) -> Ours:
    free(target)
    length = LENGTH if target.is_cuda else 64
    model: Any = llama(llama_8b(LAYERS), target, length=length)
    ids = token_ids(model, target, rows=1, length=length)
    is_lora = trained == "LoRA"
    if is_lora:
        model = with_lora(model)
    memory: Mapping[str, Any] = {"policy": "keep_all"}
    if budget_bytes is not None:
        memory = {"budget": budget_bytes}
    # Adapters are float32 beside weights in bfloat16.
    precision = "bf16-mixed" if is_lora else "32-true"
    return ours(model, ids, target, memory=memory, precision=precision)


def _point(
    target: Target, name: str, budget_bytes: int | None, *, trained: str, expandable: bool
) -> Point:
    made = _set_up(target, budget_bytes, trained=trained)
    made.step()  # compiles, and makes the optimizer's state
    made.step()
    if target.is_cuda:  # the cache stays: without it, other bytes are reserved
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    made.step()
    call = made.strategy._planned_call()
    assert call is not None
    simulated = reserved_or_reason(call.program, call.memory, environment=os.environ)
    return Point(
        trained=trained,
        expandable=expandable,
        budget=name,
        budget_bytes=budget_bytes,
        predicted=made.predicted_bytes,
        simulated_reserved=None
        if isinstance(simulated, NotSimulatedError)
        else simulated.reserved_bytes,
        **(_counted() if target.is_cuda else dict.fromkeys(_COUNTED)),
    )


_COUNTED = ("allocated", "requested", "reserved", "outside", "num_retries")


def _counted() -> dict[str, int]:
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    unused, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "requested": stats["requested_bytes.all.peak"],
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - unused - torch.cuda.memory_reserved(),
        "num_retries": stats["num_alloc_retries"],
    }


CHECKS = [
    Check(
        name=f"memory, {trained}{', expandable segments' if expandable else ''}",
        run=partial(predicted_and_measured, trained=trained, expandable=expandable),
        needs_cuda=True,
        limit_s=240,
        environment={"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"},
    )
    for trained in TRAINED
    for expandable in (False, True)
]
