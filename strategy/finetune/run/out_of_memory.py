"""The message of a run out of device memory: what was planned and measured, and which key to change."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from thunder_memsave.compat.foreign_messages import missing_bytes, says_out_of_memory
from thunder_memsave.config import MemoryConfig
from thunder_memsave.finetune.run_file.batch_sizes import BatchSizes
from thunder_memsave.finetune.run_file.config import TrainConfig
from thunder_memsave.planner.report.explain import in_units
from thunder_memsave.strategy import ThunderMemsaveStrategy

_MIB = 2**20


def what_happened(error: BaseException, strategy: ThunderMemsaveStrategy) -> str:
    """Compare the plan's peak with what the device held."""
    plan = strategy.plan
    predicted = "there was no plan yet"
    if plan is not None:
        predicted = f"the plan predicts a peak of {in_units(plan.predicted_peak_bytes)}"
    return f"{says_out_of_memory(error)}; {predicted}, {_measured()}"


def changes(
    error: BaseException, strategy: ThunderMemsaveStrategy, *, sizes: BatchSizes, train: TrainConfig
) -> tuple[str, ...]:
    """Return overrides that reduce memory, each enough by itself as far as is known, the fastest first.

    Args:
        error: It tells how many bytes were missing.
        strategy: With the plan, if there is one.
        sizes: Of the run's batches.
        train: The sizes that the run file gives.
    """
    found = []
    smaller = _smaller_budget(error, strategy)
    if smaller is not None:
        found.append(_override(strategy, smaller))
    if sizes.micro_batch_size > 1:
        # The global batch stays, so there are more micro-batches.
        fewer = _largest_divisor(sizes.micro_batch_size)
        change = f"--train.micro_batch_size={fewer}"
        if train.gradient_accumulation_steps is not None:
            steps = sizes.gradient_accumulation_steps * sizes.micro_batch_size // fewer
            change = f"{change} --train.gradient_accumulation_steps={steps}"
        found.append(change)
    return tuple(found)


def _override(strategy: ThunderMemsaveStrategy, budget_mib: int) -> str:
    """Raise the reserve if one is set, because a budget beside it is refused; otherwise lower the budget."""
    memory, available = strategy.config.memory, strategy.available_bytes
    if memory.budget != "auto" or memory.reserve == MemoryConfig().reserve or available is None:
        return f"--memory.budget={budget_mib}MiB"
    return f"--memory.reserve={-(-available // _MIB) - budget_mib}MiB"


def _largest_divisor(size: int) -> int:
    """Return half of it, or its largest other divisor, so that the global batch can stay."""
    return next(size // parts for parts in range(2, size + 1) if size % parts == 0)


def write_snapshot(directory: Path, *, rank: int) -> Path | None:
    """Write the allocator's state, for https://pytorch.org/memory_viz; None without CUDA."""
    if not torch.cuda.is_available() or not directory.is_dir():
        return None
    path = directory / f"out_of_memory-rank{rank}.pickle"
    with contextlib.suppress(OSError, RuntimeError):  # the message matters more
        torch.cuda.memory._dump_snapshot(str(path))
    return path if path.exists() else None


def _smaller_budget(error: BaseException, strategy: ThunderMemsaveStrategy) -> int | None:
    """Return a smaller budget in MiB; None without a plan that it could change."""
    missing = missing_bytes(error)
    plan = strategy.plan
    if missing is None or plan is None:
        return None
    budget = strategy.budget_bytes
    if budget is None:
        return None
    # A plan below its budget must shrink from its own peak.
    smaller = (min(budget, plan.predicted_peak_bytes) - missing) // _MIB
    return smaller if smaller > 0 else None


def _measured() -> str:
    if not torch.cuda.is_available():
        return "and nothing was measured, because torch counts no bytes on this device"
    free, total = torch.cuda.mem_get_info()
    held = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.memory_reserved()
    others = total - free - reserved
    return (
        f"measured were {in_units(held)} of tensors at most, {in_units(reserved)} in the allocator, and "
        f"{in_units(max(others, 0))} of {in_units(total)} with other programs and CUDA itself"
    )
