"""Shows the copies of a plan as plain values: three lanes over the time of a step, for programs that draw them."""

from __future__ import annotations

from typing import Any

from thunder_memsave.planner.offload.engines import StepTime


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
