"""The memory of a call whose tensors are in a pool of their own, as CUDA graphs have it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from thunder_memsave.budget.agreed import largest
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.distributed.data_parallel import DataParallel


@dataclass(frozen=True, kw_only=True, slots=True)
class WithPool:
    """A planned call that holds a pool."""

    call: PlannedCall
    """Its plan predicts the peak with the pool."""
    pool_bytes: int
    """At most so many are held between its steps, besides what is held without a pool."""


def with_pool(
    call: PlannedCall,
    more_bytes: int,
    limited_bytes: int,
    budget_bytes: int | None,
    data_parallel: DataParallel | None,
) -> WithPool | str:
    """Add the bytes of a pool to a call, or say why they do not fit; the same on all ranks. A collective.

    What the step allocates between forward and backward, and in the update, cannot take the place of what the call has
    freed: at most, all of it adds to the peak.

    Args:
        call: A call with a backward.
        more_bytes: Bytes that are held besides, such as copies of what goes in and out.
        limited_bytes: Bytes of the call without a pool that the budget limits: of tensors, or reserved.
        budget_bytes: The most of these; None: no limit.
        data_parallel: The ranks that must decide alike.
    """
    memory = call.memory
    added_bytes = more_bytes + memory.between_bytes + memory.update_peak_bytes
    peak_bytes = call.profile.peak_bytes + added_bytes
    if budget_bytes is not None:
        missing_bytes = largest(limited_bytes + added_bytes - budget_bytes, data_parallel)
        if missing_bytes > 0:
            return f"they take {added_bytes:,} bytes more, and memory.budget lacks {missing_bytes:,} of them"
    staying_bytes = memory.gradient_bytes + memory.optimizer_bytes + memory.other_bytes
    staying_bytes += sum(call.program.storages[s].nbytes for s in call.program.held)
    plan = None if call.plan is None else replace(call.plan, predicted_peak_bytes=peak_bytes)
    by_kind = {**call.profile.peak_bytes_by_kind, "pool of CUDA graphs": added_bytes}
    profile = replace(call.profile, peak_bytes=peak_bytes, peak_bytes_by_kind=by_kind)
    return WithPool(
        call=replace(call, plan=plan, profile=profile),
        pool_bytes=max(peak_bytes - staying_bytes, 0),
    )
