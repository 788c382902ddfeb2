"""Says in words what the allocator of a CUDA device reserves for a plan."""

from __future__ import annotations

from thunder_memsave.planner.caching_allocator.environment import VARIABLES, NotSimulatedError
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.planner.reserved import ReservedMemory


def describe_reserved(found: ReservedMemory | NotSimulatedError, *, peak_bytes: int) -> str:
    """Compare simulated bytes of the allocator with the plan's peak."""
    if isinstance(found, NotSimulatedError):
        return f"reserved by PyTorch's allocator: {found}"
    lines = [
        f"allocated at the peak, simulated: {_compared(found.allocated_bytes, peak_bytes)}",
        f"reserved by PyTorch's allocator, simulated: {_compared(found.reserved_bytes, peak_bytes)}",
    ]
    if found.expandable_bytes < found.reserved_bytes:
        expandable = _compared(found.expandable_bytes, peak_bytes)
        lines.append(
            f"reserved with {VARIABLES[0]}=expandable_segments:True, simulated: {expandable}"
        )
    return "\n".join(lines)


def _compared(nbytes: int, peak_bytes: int) -> str:
    return f"{in_units(nbytes)} ({nbytes / peak_bytes - 1:+.1%} against the predicted peak)"
