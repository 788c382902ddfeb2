"""Plans a run whose frozen weights hardly fit a device before they are loaded, and says which stay on the host."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from thunder_memsave.finetune.plan.plan_run import plan_run
from thunder_memsave.finetune.plan.planned_ranks import num_shards
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.graph import Device
from thunder_memsave.planner.report.offload_shown import weights_on_host, weights_shown
from thunder_memsave.settings.value_kinds import BytesOrFraction
from thunder_memsave.stored_weights.in_bytes import frozen_in_bytes

_MUCH = 0.8
"""Part of a budget above which frozen weights may leave too little; the plan, which takes up to a minute, says so."""


def layers_on_host(
    config: RunConfig,
    model: nn.Module,
    device: Device,
    budget_bytes: int | None,
    *,
    num_ranks: int = 1,
) -> tuple[tuple[str, ...], str]:
    """Return the modules whose frozen weights are to stay on the host, and a line that says so; nothing if all fit.

    In a process that has a process group, another process plans.

    Args:
        config: A run.
        model: Its model, on meta.
        device: The device of each rank that computes.
        budget_bytes: Of a step on one rank; None: no limit.
        num_ranks: Number of ranks.

    Raises:
        BudgetError: no plan was found at all.
    """
    strategy = config.of_strategy
    if budget_bytes is None or not strategy.may_stream_weights or config.memory.offload_weights:
        return (), ""
    if frozen_bytes(config, model) // num_shards(strategy, num_ranks) <= _MUCH * budget_bytes:
        return (), ""
    memory = replace(
        config.memory, budget=BytesOrFraction(budget_bytes), reserve=type(config.memory)().reserve
    )
    asked = replace(config, memory=memory)
    if not dist.is_initialized():
        return _planned(asked, device, num_ranks)
    # A plan has a process group of its own.
    context = multiprocessing.get_context("spawn")
    no_interrupts = signal.SIGINT, signal.SIG_IGN  # Ctrl-C is for the process that asked
    with ProcessPoolExecutor(1, context, signal.signal, no_interrupts) as pool:
        return pool.submit(_planned, asked, device.as_plain, num_ranks).result()


def _planned(config: RunConfig, device: Device, num_ranks: int) -> tuple[tuple[str, ...], str]:
    made = plan_run(config, device=device, num_ranks=num_ranks, has_curve=False)
    found = weights_on_host(made.call.program) if made.fits else {}
    names = [name if number is None else f"{name}.{number}" for name, number in found]
    return tuple(names), " ".join(weights_shown(made.call.program)) if names else ""


def frozen_bytes(config: RunConfig, model: nn.Module) -> int:
    """Return the bytes of a model's frozen weights in the formats that the run keeps them in."""
    kept = frozen_in_bytes(model, config.model.frozen_weights, data_parallel=None)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if kept is None:
        return sum(p.nbytes for p in frozen)
    return kept.num_bytes + sum(p.nbytes for p in frozen if not kept.has(p))
