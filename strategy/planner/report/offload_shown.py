"""Shows what a run has on the host: copies of a plan, as lanes over a step, states of optimizers, and weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from thunder_memsave.planner.graph import FETCH, Device, Op, Program, StepMemory
from thunder_memsave.planner.offload.engines import CopyRates, StepTime
from thunder_memsave.planner.report.explain import in_units

_LAYER = re.compile(r"^(.*?)\.(\d+)(?=\.|$)")


def offload_json(time: StepTime) -> dict[str, Any]:
    """Return the lanes of copies, and what they take.

    Args:
        time: Of forward and backward; what computes is busy but for `exposed_us`.
    """
    return {
        "offloaded_bytes": time.offloaded_bytes,
        "host_peak_bytes": time.host_peak_bytes,
        "step_us": time.us,
        "exposed_us": time.exposed_us,
        "lanes": {
            lane: [
                {"name": c.name, "nbytes": c.nbytes, "start_us": c.start_us, "end_us": c.end_us}
                for c in time.copies
                if c.lane == lane
            ]
            for lane in ("out", "in")
        },
    }


def states_shown(memory: StepMemory, device: Device | None = None) -> list[str]:
    """Say in a line what states of optimizers take on the host; no line if there are none.

    Args:
        memory: Of the step.
        device: The device whose rates tell how long copies take at least; None: not known.
    """
    if not memory.host_bytes:
        return []
    text = f"on the host: {in_units(memory.host_bytes)} of optimizer states, for each process"
    if memory.states_on_host:
        text += f", those of the weights of {shapes_of(memory.states_on_host)}"
    if device is not None and device.name != "cpu":
        seconds = CopyRates.of(device).states_us(memory.host_bytes) / 1e6
        text += f"; to copy them in and out takes about {seconds:.2g} s of each optimizer step"
    return [text]


def shapes_of(kinds: Sequence[tuple[tuple[int, ...], str]]) -> str:
    """Return the shapes of kinds of parameters as a text, such as `4096 x 14336, 4096 x 4096`."""
    shapes = dict.fromkeys(" x ".join(map(str, shape)) or "one number" for shape, _ in kinds)
    return ", ".join(shapes)


def weights_on_host(program: Program) -> Mapping[tuple[str, int | None], int]:
    """Return the bytes of the weights that a program copies from the host.

    The keys are the modules that read them: that around the numbered ones, and the number of the layer; or the
    module's own name and None.
    """
    sizes: dict[str, int] = {}
    fetch_of: dict[str, str] = {}
    found: dict[tuple[str, int | None], int] = {}

    def is_weight(op: Op) -> bool:
        """Tell whether an operation gathers or casts weights, waits for them, or returns a view."""
        return op.communicates or all(program.storages[s].kind == "gathered" for s in op.makes)

    for step in program.steps[: program.num_forward]:
        op = step.op
        if op.symbol == FETCH:
            sizes[op.results[0]] = op.copied_bytes
        for number, name in enumerate(op.arguments):
            if name in sizes:  # the wait for it
                fetch_of[op.results[0]] = name
            elif name in fetch_of and is_weight(op):  # in the module of what runs before it
                fetch_of[op.results[min(number, len(op.results) - 1)]] = fetch_of.pop(name)
            elif name in fetch_of:
                match = _LAYER.match(op.module)
                where = (match[1], int(match[2])) if match else (op.module, None)
                found[where] = found.get(where, 0) + sizes.pop(fetch_of.pop(name))
    return found


def weights_shown(program: Program) -> list[str]:
    """Say in a line which weights a program copies from the host; no line if there are none."""
    found = weights_on_host(program)
    if not found:
        return []
    modules: dict[str, list[int]] = {}
    for name, number in found:
        modules.setdefault(name, []).extend([] if number is None else [number])
    where = ", ".join(
        f"layer{'s' if len(n) > 1 else ''} {_ranges(sorted(n))} of {name}" if n else name
        for name, n in modules.items()
    )
    return [f"on the host: {in_units(sum(found.values()))} of frozen weights, of {where}"]


def _ranges(numbers: list[int]) -> str:
    """Return numbers as text, runs of three and more as their first and last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [[f"{r[0]}-{r[-1]}"] if len(r) > 2 else list(map(str, r)) for r in runs]
    return ", ".join(part for each in parts for part in each)
