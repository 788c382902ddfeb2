"""Chooses what one compilation is made of: its executors and its schedule."""

from __future__ import annotations

from functools import partial

from thunder.extend import (
    Executor,
    FusionExecutor,
    get_default_executors,
    resolve_executors,
)
from torch import nn

from thunder_memsave.compiler.state import Schedule
from thunder_memsave.config import CompileConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.ops.table import executors
from thunder_memsave.passes.overlap.schedule import schedule, two_largest_blocks


def executors_of(config: CompileConfig) -> tuple[Executor, ...]:
    """The ordered list of those that claim operations, and then of those that fuse."""
    if config.executors is None:
        # None that fuses: on CUDA, Thunder's default would keep what it may fuse unclaimed until after the plan.
        chosen = [e for e in get_default_executors() if not isinstance(e, FusionExecutor)]
    else:
        chosen = resolve_executors(config.executors)
    fuses = any(isinstance(e, FusionExecutor) for e in chosen)
    return (*executors(fuses=fuses), *chosen)


def schedule_of(module: nn.Module, data_parallel: DataParallel | None) -> Schedule:
    """Make the schedule of a module's traces, by the window of its ranks."""
    if data_parallel is None:
        return partial(schedule, window_bytes=0)
    prefetch, bucket_bytes = data_parallel.prefetch, data_parallel.bucket_bytes
    window_bytes = two_largest_blocks(module) if prefetch == "auto" else prefetch
    return partial(schedule, window_bytes=window_bytes, bucket_bytes=bucket_bytes)
