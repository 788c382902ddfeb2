"""Says what a plan of a run holds, and whether it fits: as text, and as plain values for JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from thunder_memsave.finetune.plan.plan_progress import Progress
from thunder_memsave.finetune.plan.speed import tokens_per_s
from thunder_memsave.planner.graph import Plan
from thunder_memsave.planner.report.explain import explain, in_units, kinds_table
from thunder_memsave.planner.report.offload_shown import (
    offload_json,
    states_shown,
    weights_on_host,
    weights_shown,
)
from thunder_memsave.planner.report.reserved_shown import describe_reserved
from thunder_memsave.planner.reserved import ReservedMemory

if TYPE_CHECKING:
    from thunder_memsave.finetune.plan.plan_run import RunPlan
    from thunder_memsave.finetune.run_file.config import RunConfig


def describe_plan(made: RunPlan, config: RunConfig, progress: Progress) -> str:
    """Write the tables, and say what loading holds and whether the run fits."""
    plan = plan_of(made)
    return "\n".join(
        [
            title(made, config),
            "",
            "on each rank, when it holds the most:",
            kinds_table(made.call.profile),
            *_reserved(made),
            *states_shown(made.call.memory, made.device),
            *weights_shown(made.call.program),
            *_updates(made),
            "",
            explain(plan, num_rows=12),
            "",
            f"smallest budget with a plan: about {in_units(made.smallest_bytes)}{_of_tensors(made)}",
            f"twice the rows per micro-batch: about {in_units(made.doubled_bytes)} with the same plan",
            *([] if made.loading is None else [made.loading.sentence]),
            *([_speed(made)] if made.fits else []),
            _made_in(plan, progress),
            "",
            _verdict(made, config),
            *_lacking(made, config),
        ]
    )


def _lacking(made: RunPlan, config: RunConfig) -> list[str]:
    """Warn of a budget that leaves less of the device than CUDA and nccl are estimated to need."""
    if made.lacking_bytes == 0:
        return []
    advice = "raise memory.reserve" if config.memory.budget == "auto" else "lower memory.budget"
    return [
        f"warning: the budget leaves {in_units(made.lacking_bytes)} less of the {made.device.name} than what is "
        f"outside of PyTorch's allocator is estimated to need; {advice} by that."
    ]


def _reserved(made: RunPlan) -> list[str]:
    """Say what is reserved, on CUDA devices."""
    if made.reserved is None:
        return []
    outside = ", ".join(f"{in_units(n)} of {name}" for name, n in made.outside_bytes.items())
    return [
        describe_reserved(made.reserved, peak_bytes=made.call.profile.peak_bytes),
        f"outside of PyTorch's allocator, estimated: {outside}",
    ]


def _updates(made: RunPlan) -> list[str]:
    """Say that backward updates weights, where it does."""
    if not made.call.updated:
        return []
    return [
        "each weight is updated in backward, as soon as its gradient is there (memory.optimizer_in_backward)"
    ]


def title(made: RunPlan, config: RunConfig) -> str:
    """Name the model, the devices and the rows."""
    ranks = f"{made.num_ranks} rank{'s' if made.num_ranks > 1 else ''}"
    rows = f"{made.num_rows} row{'s' if made.num_rows > 1 else ''} of {made.num_tokens:,} tokens"
    return f"{config.model.name_or_path} on {ranks} of {made.device.name}, {rows} each"


def _made_in(plan: Any, progress: Progress) -> str:
    total_s, solve_s = sum(progress.cpu_seconds.values()), progress.cpu_seconds.get("solve", 0.0)
    took = f"made in {total_s:.0f} s, {solve_s:.1f} s of it to solve"
    if not math.isfinite(plan.gap):
        return took
    what = "waits and recomputes" if plan.actions.offloaded else "recomputes"
    if plan.gap == 0.0:
        return f"{took}: no plan {what} less"
    return f"{took}: it {what} {plan.gap:.1%} more than any plan must"


def _speed(made: RunPlan) -> str:
    devices = f"{made.num_ranks} device{'s' if made.num_ranks > 1 else ''}"
    copies = " but with the copies of its states" if made.call.memory.host_bytes else ""
    return (
        f"speed, a forecast that no device has confirmed: {tokens_per_s(made):,.0f} tokens/s on {devices}, without the "
        f"optimizer's update{copies}"
    )


def _of_tensors(made: RunPlan) -> str:
    """Say that the smallest budget does not count what is reserved: only a plan that was carried out is simulated."""
    return " of tensors" if made.fits and made.limits_reserved else ""


def _verdict(made: RunPlan, config: RunConfig) -> str:
    peak = in_units(made.call.profile.peak_bytes)
    if made.limits_reserved and isinstance(made.reserved, ReservedMemory):
        peak = f"{in_units(made.reserved.reserved_bytes)} reserved"
    if made.budget_bytes is None:
        return f"there is no budget; it needs {peak}."
    budget = in_units(made.budget_bytes)
    if made.fits and made.call.empties_cache:
        return (
            f"it fits {budget}, but only if PyTorch's allocator gives cached memory back when that is reached, which "
            "waits for the device; a larger budget is faster."
        )
    if made.fits:
        return f"it fits: {peak} of {budget}."
    return (
        f"it does not fit: the budget is {budget}, and the smallest for which a plan was found is "
        f"{in_units(made.smallest_bytes)}; the tables above are for {peak}. {_what_needs_less(made)}"
    )


def _what_needs_less(made: RunPlan) -> str:
    """Say which settings lower the peak: at the optimizer's update there are no activations."""
    profile = made.call.profile
    if profile.peak_bytes > profile.update_peak_bytes:
        return (
            "A smaller train.micro_batch_size or data.max_seq_length needs less, and so do more ranks with "
            "strategy.sharding zero3."
        )
    less = "more ranks with strategy.sharding zero3, or optimizer.states in fewer bits"
    gradients = in_units(profile.peak_bytes_by_kind.get("gradient", 0))
    if not made.call.updated and made.num_micro_batches == 1:
        less += (
            ", or, without clipping (train.max_grad_norm: null), memory.optimizer_in_backward, which frees "
            f"{gradients} of gradients one by one"
        )
    return f"The peak is that of the optimizer's update, which fewer tokens do not lower. What needs less: {less}."


def as_json(made: RunPlan, progress: Progress) -> dict[str, Any]:
    """Return the plan as plain values."""
    plan, profile = plan_of(made), made.call.profile
    return {
        "fits": made.fits,
        "device": made.device.name,
        "world_size": made.num_ranks,
        "budget_bytes": made.budget_bytes,
        "predicted_peak_bytes": profile.peak_bytes,
        "peak_bytes_by_kind": dict(profile.peak_bytes_by_kind),
        "reserved_simulated": (
            dataclasses.asdict(made.reserved) if isinstance(made.reserved, ReservedMemory) else None
        ),
        "outside_bytes": dict(made.outside_bytes),
        "keep_all_peak_bytes": plan.keep_all_peak_bytes,
        "saved_bytes": plan.saved_bytes,
        "recompute_us": plan.recompute_us,
        "lower_bound_us": plan.lower_bound_us,
        "gap": plan.gap if math.isfinite(plan.gap) else None,
        "cpu_seconds": dict(progress.cpu_seconds),
        "tokens_per_s": tokens_per_s(made),
        "smallest_budget_bytes": made.smallest_bytes,
        "doubled_batch_bytes": made.doubled_bytes,
        "optimizer_bytes_on_host": made.call.memory.host_bytes,
        "updates_in_backward": bool(made.call.updated),
        "weights_on_host": [
            {"module": name if number is None else f"{name}.{number}", "nbytes": nbytes}
            for (name, number), nbytes in weights_on_host(made.call.program).items()
        ],
        "offload": None if made.call.time is None else offload_json(made.call.time),
        "curve": [list(point) for point in made.curve],
        "decisions": [dataclasses.asdict(each) for each in plan.decisions],
    }


def plan_of(made: RunPlan) -> Plan:
    """Return the plan of the run's call."""
    assert made.call.plan is not None, "a model with trained weights has a backward"
    return made.call.plan
