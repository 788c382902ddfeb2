"""Checks what the strategy would refuse when a run starts, so that `validate` and `train` refuse it alike."""

from __future__ import annotations

import os

import torch
from torch import nn

from thunder_memsave.budget.pins import check_pins
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.launch import world_size
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.fp8.recipe import refuse_own_scales
from thunder_memsave.materialize.host_weights import named_for_host
from thunder_memsave.measure.devices import total_bytes


def check_strategy(config: RunConfig, problems: Problems) -> None:
    """Check the strategy's settings against this device and the number of processes; needs no model."""
    problems.check(
        lambda: config.of_strategy,
        reads=("strategy", "memory", "fp8", "model.frozen_weights"),
        about="strategy",
    )
    problems.check(
        lambda: config.memory.budget_bytes(total_bytes(_device())),
        reads=("memory",),
        about="memory.budget",
    )
    problems.check(
        lambda: refuse_own_scales(config.fp8, num_ranks=world_size(config)),
        reads=("fp8", "devices"),
        about="fp8",
    )


def check_named_modules(config: RunConfig, model: nn.Module | None, problems: Problems) -> None:
    """Check that `memory` names modules of the model, if there is one, and for the host those that may be there."""
    if model is None:
        return
    names = [name for name, _ in model.named_modules()]
    problems.check(lambda: check_pins(config.memory, names), reads=("memory",), about="memory")
    problems.check(
        lambda: named_for_host(model, config.of_strategy),
        reads=("strategy", "memory", "fp8", "model.frozen_weights", "devices", "lora"),
        about="memory.offload_weights",
    )


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
