"""Compares the predicted time of a step whose copies go to the host with the time that it takes.

Each operation pauses for a set time, and each copy takes what a set bandwidth makes of its bytes, so that nothing but
the timeline decides: which copy waits for which, and what computes meanwhile. What Python itself takes is measured on
the same step without pauses, and left out.

    PYTHONPATH=.typing:tests python benchmarks/offload_timeline.py
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from harness import models
from harness.copy_engines import small_values
from harness.fabric import make_fabric
from thunder_memsave.budget import memory_planner, planned_call
from thunder_memsave.compiler import run
from thunder_memsave.ops.host_copies.buffers import HostBuffers
from thunder_memsave.ops.host_copies.engine import Host, other_host
from thunder_memsave.planner.graph import Device, Op, Program, TrainingGraph
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.strategy import ThunderMemsaveStrategy

if TYPE_CHECKING:
    from thunder.core.trace import TraceCtx

BANDWIDTHS = (4e6, 1e6, 2.5e5)
"""Bytes per second, each way."""
BUDGETS = (0.8, 0.7, 0.6)
"""Parts of the peak with all kept."""
SHORTEST_US, STEPS_US = 1000, 500


def pause_us(symbol: str) -> float:
    """Return the time that operations of a symbol are made to take: 1 to 3 ms."""
    return float(SHORTEST_US + STEPS_US * (zlib.crc32(symbol.encode()) % 5))


@dataclass
class PacedEngine:
    """Copies of each direction one after the other, at a bandwidth."""

    bytes_per_s: float
    is_paced: bool = True
    _threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)

    def begin(
        self, source: Tensor, target: Tensor, direction: Literal["out", "in"]
    ) -> Callable[[], None]:
        thread = self._threads.setdefault(direction, ThreadPoolExecutor(1))

        def copy() -> None:
            end = time.perf_counter() + source.numel() / self.bytes_per_s
            target.copy_(source)
            if self.is_paced:
                time.sleep(max(end - time.perf_counter(), 0.0))

        return thread.submit(copy).result


@dataclass
class Pauses:
    """Makes operations take their time."""

    is_on: bool = True
    views: set[str] = field(default_factory=set)
    """Symbols that take none."""

    def costs_us(self, ops: Sequence[Op]) -> tuple[float, ...]:
        """Return the time of each operation."""
        self.views |= {op.symbol for op in ops if op.repeat == "free"}
        return tuple(pause_us(op.symbol) if self._pauses(op.symbol) else 0.0 for op in ops)

    def callable_of(self, trace: TraceCtx, made: Callable[[TraceCtx], Any]) -> Any:
        """Make a callable of a trace whose operations pause."""
        gather = trace.python_ctx

        def pausing() -> dict[str, Any]:
            return {
                n: self._with_pause(n, f) if self._pauses(n) else f for n, f in gather().items()
            }

        with patch.object(trace, "python_ctx", pausing):
            return made(trace)

    def _pauses(self, symbol: str) -> bool:
        return symbol.startswith(("aten_", "rms_norm")) and symbol not in self.views

    def _with_pause(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def paused(*args: Any, **kwargs: Any) -> Any:
            end = time.perf_counter() + pause_us(name) / 1e6
            result = function(*args, **kwargs)
            if self.is_on:
                wait_until(end)
            return result

        return paused


def wait_until(end: float) -> None:
    """Sleep, which lets copies go on, and then look at the clock: sleeping alone takes too long by 0.1 ms."""
    time.sleep(max(end - time.perf_counter() - 2e-4, 0.0))
    while time.perf_counter() < end:
        pass


@contextmanager
def paced(pauses: Pauses, bytes_per_s: float) -> Iterator[PacedEngine]:
    """Let all steps that are planned and run here take the times that are set."""
    engine, rates = PacedEngine(bytes_per_s), CopyRates(bytes_per_s=bytes_per_s, copy_us=0.0)
    made = run._callable

    def program_costs(program: Program, device: Device) -> tuple[float, ...]:
        return pauses.costs_us([step.op for step in program.steps])

    def graph_costs(graph: TrainingGraph, *_: Any) -> tuple[float, ...]:
        return pauses.costs_us(graph.ops)

    with (
        patch.object(CopyRates, "of", lambda device: rates),
        patch.object(planned_call, "program_costs_us", program_costs),
        patch.object(memory_planner, "costs_us", graph_costs),
        patch.object(
            memory_planner.MemoryPlanner, "_timed", lambda self, question, times: question
        ),
        patch.object(run, "_callable", lambda trace: pauses.callable_of(trace, made)),
        small_values(),
        other_host(torch.device("cpu"), Host(engine, HostBuffers())),
    ):
        yield engine


@dataclass(frozen=True)
class Ran:
    """A step as it was predicted, and as it ran."""

    peak_bytes: int
    offloaded_bytes: int
    predicted_ms: float
    exposed_ms: float
    measured_ms: float

    @property
    def error(self) -> float:
        """Part by which the prediction is off."""
        return self.measured_ms / self.predicted_ms - 1


def ran(memory: dict[str, Any], bytes_per_s: float, repeats: int) -> Ran:
    """Plan a step, and run it with and without pauses."""
    pauses = Pauses()
    with paced(pauses, bytes_per_s) as engine:
        fabric = make_fabric(devices=1, memory=memory)
        torch.manual_seed(0)
        module = models.llama(3)
        model, _ = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        ids = models.token_batch(4, 32)

        def step_ms() -> float:
            start = time.perf_counter()
            fabric.backward(model(input_ids=ids, labels=ids).loss)
            return 1e3 * (time.perf_counter() - start)

        step_ms()
        times = []
        for is_on in (True, False):
            pauses.is_on = engine.is_paced = is_on
            times.append(statistics.median(step_ms() for _ in range(repeats)))
        assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
        call = fabric.strategy._planned_call()
    assert call is not None
    assert call.plan is not None
    costs_us = pauses.costs_us([step.op for step in call.program.steps])
    return Ran(
        peak_bytes=call.profile.peak_bytes,
        offloaded_bytes=call.plan.offloaded_bytes,
        predicted_ms=(sum(costs_us) if call.time is None else call.time.us) / 1e3,
        exposed_ms=0.0 if call.time is None else call.time.exposed_us / 1e3,
        measured_ms=times[0] - times[1],
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    whole = ran({"policy": "keep_all"}, BANDWIDTHS[0], options.repeats)
    rows = [("none", "", whole)]
    for part in BUDGETS:
        budget = int(part * whole.peak_bytes)
        memory = {"budget": budget, "offload": "activations", "host_budget": 2**28}
        rows += [
            (f"{part:.1f}", f"{b / 1e6:.2f}", ran(memory, b, options.repeats)) for b in BANDWIDTHS
        ]
    lines = [
        "| budget | MB/s | offloaded kB | predicted ms | of it waiting | measured ms | error |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {part} | {mb} | {r.offloaded_bytes / 1e3:.0f} | {r.predicted_ms:.1f} | {r.exposed_ms:.1f} "
            f"| {r.measured_ms:.1f} | {r.error:+.1%} |"
            for part, mb, r in rows
        ),
    ]
    print("\n".join(lines))
    if options.save is not None:
        options.save.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
