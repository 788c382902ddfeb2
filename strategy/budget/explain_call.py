"""Shows a planned call as text: the parts of its peak, what is reserved, the decisions, and a loss outside of it."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_memsave.budget.allocator_settings import allocator_environment
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.report.explain import explain, kinds_table
from thunder_memsave.planner.report.offload_shown import states_shown, weights_shown
from thunder_memsave.planner.report.outside_loss import loss_outside
from thunder_memsave.planner.report.reserved_shown import describe_reserved
from thunder_memsave.planner.report.summary import plan_summary

_NO_PLAN = (
    "there is no plan yet: it is made when a model that fabric.setup() returned is called for the first time with "
    "gradients enabled. Run one step first; `thunder-memsave plan` makes one without running."
)


def explain_call(
    call: PlannedCall | None,
    *,
    memory: MemoryConfig,
    device_type: str,
    tile_bytes: int,
    num_rows: int,
    notes: Sequence[str] = (),
) -> str:
    """Describe a call's plan.

    Args:
        call: The call; None: nothing was compiled.
        memory: The settings that it was planned with.
        device_type: Such as `cuda`, on which memory is reserved.
        tile_bytes: Most bytes of a loss inside of a call.
        num_rows: Most rows of the table of decisions.
        notes: What to say first.

    Raises:
        RuntimeError: there is no plan.
    """
    if call is None or call.plan is None:
        raise RuntimeError(_NO_PLAN)
    parts = [kinds_table(call.profile), explain(call.plan, num_rows=num_rows)]
    if device_type == "cuda":
        environment = allocator_environment(memory)
        found = call.reserved_or_reason(environment)
        parts.insert(1, describe_reserved(found, peak_bytes=call.profile.peak_bytes))
    parts += states_shown(call.memory) + weights_shown(call.program)
    parts += loss_outside(call.graph, call.memory, tile_bytes=tile_bytes)
    return "\n\n".join([*notes, *parts])


def summarize_call(call: PlannedCall | None) -> list[str]:
    """Describe a call's plan in three lines.

    Raises:
        RuntimeError: there is no plan.
    """
    if call is None or call.plan is None:
        raise RuntimeError(_NO_PLAN)
    return plan_summary(call.plan, call.profile)
