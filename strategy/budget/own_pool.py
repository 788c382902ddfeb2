"""The memory of a call whose tensors are in a pool of their own, as CUDA graphs have it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thunder_memsave.budget.planned_call import PlannedCall


@dataclass(frozen=True, kw_only=True, slots=True)
class WithPool:
    """A planned call that holds a pool."""

    call: PlannedCall
    """Its plan predicts the peak with the pool."""
    peak_bytes: int
    added_bytes: int
    """The part of the peak that the pool costs."""
    pool_bytes: int
    """At most so many are held between its steps, besides what is held without a pool."""


def with_pool(call: PlannedCall, *, more_bytes: int) -> WithPool:
    """Add the bytes of a pool to a call.

    What the step allocates between forward and backward, and in the update, cannot take the place of what the call has
    freed: at most, all of it adds to the peak.

    Args:
        call: A call with a backward.
        more_bytes: Bytes that are held besides, such as copies of what goes in and out.
    """
    memory = call.memory
    added_bytes = more_bytes + memory.between_bytes + memory.update_peak_bytes
    peak_bytes = call.profile.peak_bytes + added_bytes
    staying_bytes = memory.gradient_bytes + memory.optimizer_bytes + memory.other_bytes
    staying_bytes += sum(call.program.storages[s].nbytes for s in call.program.held)
    plan = None if call.plan is None else replace(call.plan, predicted_peak_bytes=peak_bytes)
    return WithPool(
        call=replace(call, plan=plan),
        peak_bytes=peak_bytes,
        added_bytes=added_bytes,
        pool_bytes=max(peak_bytes - staying_bytes, 0),
    )
