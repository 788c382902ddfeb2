"""Measures training steps: ours, eager, torch.compile, the same with checkpointed layers, and ours in fp8."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu.checks import Check, Measured, Target, WrongError
from gpu.models import (
    GIB,
    LLAMA_1B,
    Shape,
    compiled,
    free,
    llama,
    llama_8b,
    ours,
    plain,
    synchronized_s,
    token_ids,
)

ROUNDS = 7
LAYERS = 4
NUM_KERNELS = 30
FP8 = {"recipe": "current"}

Step = Callable[[], None]


@dataclass(kw_only=True)
class Timed:
    """What one way takes."""

    seconds: list[float] = field(default_factory=list)
    first_s: float = 0.0
    """Of the first step: capture, compilation and planning."""
    step_bytes: int = 0
    """Peak of what a step allocates beside what it finds."""
    error: str = ""

    @property
    def median_s(self) -> float | None:
        """The median over the rounds; None if it did not run."""
        return median(self.seconds) if self.seconds else None


def interleaved(ways: Mapping[str, Callable[[], Step]], target: Target) -> dict[str, Timed]:
    """Time a step of all ways in turns; one that fails is left out of later rounds, with its error."""
    found = {name: Timed() for name in ways}
    steps: dict[str, Step] = {}
    for name, make in ways.items():
        _runs(found[name], partial(_begin, name, make, steps, found[name], target))
        gc.collect()
    for number in range(ROUNDS if target.is_cuda else 2):
        names = [name for name in steps if not found[name].error]
        for name in names if number % 2 else reversed(names):
            start = synchronized_s(target)
            if _runs(found[name], steps[name]):
                found[name].seconds.append(synchronized_s(target) - start)
    return found


def _begin(
    name: str, make: Callable[[], Step], steps: dict[str, Step], timed: Timed, target: Target
) -> None:
    """Make a step and take it twice: the first compiles, the second is measured for its memory."""
    steps[name] = step = make()
    start = synchronized_s(target)
    step()
    timed.first_s = synchronized_s(target) - start
    free(target)
    before = torch.cuda.memory_allocated() if target.is_cuda else 0
    step()
    if target.is_cuda:
        timed.step_bytes = torch.cuda.max_memory_allocated() - before


def _runs(timed: Timed, run: Callable[[], object]) -> bool:
    try:
        run()
    except Exception as error:
        lines = str(error).strip().splitlines() or ["without a message"]
        timed.error = f"{type(error).__name__}: {lines[0][:200]}"
    return not timed.error


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, its rows, and the dtypes of a step."""

    shape: Shape
    rows: int
    length: int
    mixed: bool
    """Weights in float32 and autocast to bfloat16; otherwise all is bfloat16."""

    def ways(self, target: Target, *, fp8: bool) -> dict[str, Callable[[], Step]]:
        """Return all ways; each makes a model of its own."""
        made: dict[str, Callable[[], Step]] = {
            "ours": partial(self._ours, target),
            "eager": partial(self._plain, target, compile=False, checkpointed=False),
            "torch.compile": partial(self._plain, target, compile=True, checkpointed=False),
            "torch.compile, checkpointed": partial(
                self._plain, target, compile=True, checkpointed=True
            ),
        }
        if fp8:
            made["ours, fp8"] = partial(self._ours, target, fp8=FP8)
        if target.is_cuda:
            made["ours, CUDA graphs"] = partial(self._ours, target, cuda_graphs=True)
            made["ours, not fused"] = partial(self._ours, target, fusion=False)
        return made

    def model(self, target: Target) -> tuple[Any, torch.Tensor]:
        """Make the model and its rows."""
        length = self.length if target.is_cuda else 64
        dtype = torch.float32 if self.mixed else torch.bfloat16
        model = llama(self.shape, target, length=length, dtype=dtype)
        return model, token_ids(model, target, rows=self.rows, length=length)

    def _ours(self, target: Target, **settings: Any) -> Step:
        model, ids = self.model(target)
        return ours(model, ids, target, precision=self.precision, **settings).step

    def _plain(self, target: Target, *, compile: bool, checkpointed: bool) -> Step:
        model, ids = self.model(target)
        module = compiled(model, checkpointed=checkpointed) if compile else model
        return plain(model, module, ids, autocast=torch.bfloat16 if self.mixed else None)

    @property
    def precision(self) -> str:
        """Fabric's name of the dtypes."""
        return "bf16-mixed" if self.mixed else "32-true"


def layers_of_8b(target: Target, *, way: str) -> Measured:
    """Time steps of 4 layers in one way, and what the device does in one of them."""
    work = Work(shape=llama_8b(LAYERS), rows=1, length=8192, mixed=False)
    timed, steps = Timed(), dict[str, Step]()
    _begin(way, work.ways(target, fp8=True)[way], steps, timed, target)
    host_s = []
    for _ in range(ROUNDS if target.is_cuda else 1):
        start = synchronized_s(target)
        steps[way]()
        host_s.append(time.perf_counter() - start)
        timed.seconds.append(synchronized_s(target) - start)
    kernels = _kernels(steps[way], target)
    kernels_ms = sum(ms for ms, _, _ in kernels)
    line = (
        f"{1e3 * median(timed.seconds):.1f} ms, {timed.step_bytes / GIB:.2f} GiB beside what it finds; "
        f"{sum(count for _, count, _ in kernels)} kernels take {kernels_ms:.1f} ms, the host launches for "
        f"{1e3 * median(host_s):.1f} ms; first step {timed.first_s:.0f} s"
    )
    most = [{"ms": round(ms, 3), "num": n, "kernel": name} for ms, n, name in kernels[:NUM_KERNELS]]
    return Measured(line=line, numbers={**_numbers({way: timed})[way], "kernels": most})


def _kernels(step: Step, target: Target) -> list[tuple[float, int, str]]:
    """Return milliseconds, number and name of the kernels of a step, from the one that takes most."""
    if not target.is_cuda:
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        torch.cuda.synchronize()
    ran = [e for e in record.key_averages() if e.device_time_total > 0]  # others are calls
    return sorted(((e.device_time_total / 1e3, e.count, e.key[:160]) for e in ran), reverse=True)


def whole_1b(target: Target) -> Measured:
    """Time the whole 1B with AdamW."""
    work = Work(shape=LLAMA_1B, rows=4, length=2048, mixed=True)
    found = interleaved(work.ways(target, fp8=False), target)
    shown = "; ".join(_shown(name, timed.median_s, timed) for name, timed in found.items())
    return _judged(f"a step of 4 x 2,048 tokens: {shown}", _numbers(found), found)


def _judged(line: str, numbers: Mapping[str, Any], found: Mapping[str, Timed]) -> Measured:
    """Fail where one of ours did not run; another tool's error is in the line."""
    if any(timed.error for name, timed in found.items() if name.startswith("ours")):
        raise WrongError(line, numbers)
    return Measured(line=line, numbers=numbers)


def _shown(name: str, seconds: float | None, timed: Timed) -> str:
    if seconds is None:
        return f"{name} did not run ({timed.error})"
    return f"{name} {1e3 * seconds:.1f} ms, {timed.step_bytes / GIB:.1f} GiB"


def _numbers(found: Mapping[str, Timed]) -> dict[str, Any]:
    return {
        name: {
            "median_s": timed.median_s,
            "seconds": timed.seconds,
            "first_s": timed.first_s,
            "step_bytes": timed.step_bytes,
            "error": timed.error,
        }
        for name, timed in found.items()
    }


WAYS = ("ours", "torch.compile", "eager", "torch.compile, checkpointed", "ours, fp8")
ON_CUDA = ("ours, CUDA graphs", "ours, not fused")

CHECKS = [
    *(
        Check(
            name=f"4 layers of 8B, {way}",
            run=partial(layers_of_8b, way=way),
            limit_s=120,
            group="layers",
            needs_cuda=way in ON_CUDA,
        )
        for way in (*WAYS, *ON_CUDA)
    ),
    Check(name="Llama 3.2 1B", run=whole_1b, limit_s=150),
]
