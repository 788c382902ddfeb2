"""Shows what a run has on the host: copies of a plan, as lanes over the time of a step, and states of optimizers."""

from __future__ import annotations

from typing import Any

from thunder_memsave.planner.graph import Device, StepMemory
from thunder_memsave.planner.offload.engines import CopyRates, StepTime
from thunder_memsave.planner.report.explain import in_units


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
    if device is not None and device.name != "cpu":
        seconds = CopyRates.of(device).us(memory.host_bytes) / 1e6
        text += f"; to copy them in and out takes about {seconds:.2g} s of each optimizer step"
    return [text]
