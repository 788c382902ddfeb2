"""Copies to the host and back: bandwidth, activations, optimizer states and frozen weights: bits, peak and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpu.checks import Check, Measured, Target, require
from gpu.models import (
    GIB,
    Ours,
    free,
    llama,
    llama_8b,
    ours,
    smallest_bytes,
    synchronized_s,
    token_ids,
    with_lora,
)
from gpu.plans import ENVIRONMENT
from thunder_memsave.budget.ways import compressible
from thunder_memsave.compiler import split
from thunder_memsave.finetune.process.deterministic import unfilled_choice
from thunder_memsave.materialize import host_weights
from thunder_memsave.ops.host_copies.engine import host_of
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.offload.copies import LEAST_BYTES

LAYERS = 2
LENGTH = 4096
STEPS = 5
LIMIT = 0.02
"""Of the predicted peak, by which the allocated bytes may differ from it."""


def bandwidth(target: Target) -> Measured:
    """Copy a large buffer out, back, and both ways at once, with the engine of plans."""
    nbytes = 2**30 if target.is_cuda else 2**20
    place = torch.device(target.device, 0) if target.is_cuda else torch.device("cpu")
    host = host_of(place)
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=place)
    other = torch.empty_like(source)
    first, second = host.buffers.take(nbytes), host.buffers.take(nbytes)

    def gb_per_s(*copies: tuple[Tensor, Tensor, Any]) -> float:
        found = []
        for _ in range(STEPS):
            start = synchronized_s(target)
            waits = [host.engine.begin(a, b, direction) for a, b, direction in copies]
            for wait in waits:
                wait()
            found.append(nbytes / (synchronized_s(target) - start) / 1e9)
        return median(found)

    out = gb_per_s((source, first, "out"))
    back = gb_per_s((first, other, "in"))
    require(torch.equal(source, other), "what came back is not what went out")
    both = gb_per_s((source, second, "out"), (first, other, "in"))
    table = DEVICES["h100"].host_bytes_per_s / 1e9
    return Measured(
        line=f"out {out:.1f}, back {back:.1f}, both at once {both:.1f} GB/s each way; plans assume {table:.0f}",
        numbers={"out_gb_per_s": out, "in_gb_per_s": back, "both_gb_per_s": both},
    )


@unfilled_choice()
def optimizer_states(target: Target) -> Measured:
    """Take the same steps with states on the device and on the host; the first of those come during the clipping."""
    run = partial(_run, target, max_norm=1.0)
    device = run({"policy": "keep_all"})
    host = run({"policy": "keep_all", "offload": "optimizer", **_host(target)})
    _require_same_bits(device, host)
    line = f"device {_shown(device)}; host {_shown(host)}"
    _require_predicted(target, host, line)
    return Measured(line=line, numbers={"device": device.numbers, "host": host.numbers})


@unfilled_choice()
def states_beside_backward(target: Target) -> Measured:
    """Take the same steps with updates in backward: states on the device, on the host, and there without overlap."""
    keep: dict[str, Any] = {"policy": "keep_all", "optimizer_in_backward": True}
    away = {**keep, "offload": "optimizer", **_host(target)}
    device, host = _run(target, keep), _run(target, away)
    with patch.object(split, "copy_states", lambda backward, room: backward):
        alone = _run(target, away)
    for each in (host, alone):
        _require_same_bits(device, each)
    line = (
        f"device {_shown(device)}; host {_shown(host)}; one weight after the other {_shown(alone)}"
    )
    for each in (device, host, alone):
        _require_predicted(target, each, line)
    numbers = {"device": device.numbers, "host": host.numbers, "alone": alone.numbers}
    return Measured(line=line, numbers=numbers)


@unfilled_choice()
def activations(target: Target) -> Measured:
    """Take the same steps with everything kept, and half way between that and the smallest budget, with offload.

    They train adapters: with a whole model of so few layers the update has the peak, which no activation lowers.
    """
    run = partial(_run, target, change=with_lora)
    kept = run({"policy": "keep_all"})
    smallest = smallest_bytes(lambda n: run({"budget": n, "offload": "none"}))
    budget = (kept.predicted_bytes + smallest) // 2
    alone = run({"budget": budget, "offload": "none"})
    mixed = run({"budget": budget, "offload": "activations", **_host(target)})
    for each in (alone, mixed):
        _require_same_bits(kept, each)
    line = f"all kept {_shown(kept)}; half way {_shown(alone)}; with offload {_shown(mixed)}"
    _require_predicted(target, mixed, line)
    numbers = {"kept": kept.numbers, "recompute": alone.numbers, "offload": mixed.numbers}
    return Measured(line=line, numbers=numbers)


@unfilled_choice()
def frozen_weights(target: Target, *, fp8: Mapping[str, Any] | None = None) -> Measured:
    """Take the same steps of adapters with the frozen weights of all layers on the device and on the host."""
    keep: dict[str, Any] = {"policy": "keep_all"}
    layers = {**keep, "offload_weights": ("*.layers",), **_host(target)}
    device = _run(target, keep, change=with_lora, fp8=fp8)
    least = LEAST_BYTES if target.is_cuda else 1024  # those of a tiny model are small
    with patch.object(host_weights, "LEAST_BYTES", least):
        host = _run(target, layers, change=with_lora, fp8=fp8)
    _require_same_bits(device, host)
    line = f"device {_shown(device)}; host {_shown(host)}"
    require(host.predicted_bytes < device.predicted_bytes, f"nothing is saved: {line}")
    _require_predicted(target, host, line)
    return Measured(line=line, numbers={"device": device.numbers, "host": host.numbers})


@unfilled_choice()
def compressed(target: Target) -> Measured:
    """Take the same steps half way between all kept and the smallest budget, recomputing and with values in fp8."""
    run = partial(_run, target, change=with_lora)
    with patch.object(compressible, "LEAST_BYTES", 2**20 if target.is_cuda else 1024):
        kept = run({"policy": "keep_all"})
        smallest = smallest_bytes(lambda n: run({"budget": n, "offload": "none"}))
        budget = (kept.predicted_bytes + smallest) // 2
        alone = run({"budget": budget, "offload": "none"})
        stored = run({"budget": budget, "offload": "none", "compress": "fp8"})
    _require_same_bits(kept, alone)
    line = f"all kept {_shown(kept)}; half way {_shown(alone)}; in fp8 {_shown(stored)}"
    _require_predicted(target, stored, line)
    numbers = {"kept": kept.numbers, "recompute": alone.numbers, "fp8": stored.numbers}
    return Measured(line=line, numbers=numbers)


class _Run:
    """Some steps of one setting: weights after them, peak and time."""

    def __init__(self, made: Ours, target: Target) -> None:
        made.step()  # compiles, and makes the optimizer's state
        made.step()
        free(target)
        seconds = []
        for _ in range(STEPS):
            start = synchronized_s(target)
            made.step()
            seconds.append(synchronized_s(target) - start)
        self.predicted_bytes = made.predicted_bytes
        self.seconds = median(seconds)
        self.allocated_bytes = torch.cuda.max_memory_allocated() if target.is_cuda else None
        self.weights = [p.detach().cpu() for p in made.module.parameters()]

    @property
    def numbers(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "predicted_bytes": self.predicted_bytes,
            "allocated_bytes": self.allocated_bytes,
        }


def _run(
    target: Target,
    memory: Mapping[str, Any],
    change: Callable[[Any], Any] = lambda model: model,
    **settings: Any,
) -> _Run:
    free(target)
    torch.manual_seed(0)
    length = LENGTH if target.is_cuda else 64
    model: Any = llama(llama_8b(LAYERS), target, length=length)
    ids = token_ids(model, target, rows=1, length=length)
    return _Run(ours(change(model), ids, target, memory=memory, **settings), target)


def _host(target: Target) -> dict[str, Any]:
    return {"host_budget": 64 * 2**30 if target.is_cuda else 2**30}


def _shown(run: _Run) -> str:
    return f"{run.seconds * 1e3:.0f} ms at {run.predicted_bytes / GIB:.2f} GiB"


def _require_same_bits(one: _Run, other: _Run) -> None:
    for number, (a, b) in enumerate(zip(one.weights, other.weights, strict=True)):
        require(torch.equal(a, b), f"weight {number} differs after {STEPS + 2} steps")


def _require_predicted(target: Target, run: _Run, line: str) -> None:
    if run.allocated_bytes is not None:
        error = run.allocated_bytes / run.predicted_bytes - 1
        require(abs(error) <= LIMIT, f"the peak is {error:+.1%} from the prediction: {line}")


_RUNS: Mapping[str, Callable[[Target], Measured]] = {
    "optimizer states": optimizer_states,
    "optimizer states in backward": states_beside_backward,
    "activations": activations,
    "activations in fp8 instead": compressed,
    "frozen weights": frozen_weights,
    "frozen weights in fp8": partial(frozen_weights, fp8={"recipe": "current"}),
}

CHECKS = [
    Check(name="offload, bandwidth", run=bandwidth, alone=True),
    *(
        Check(name=f"offload, {name}", run=run, limit_s=240, alone=True, environment=ENVIRONMENT)
        for name, run in _RUNS.items()
    ),
]
