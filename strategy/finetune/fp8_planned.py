"""The linears of a planned run that compute in fp8, on a device that need not be here."""

from __future__ import annotations

import torch
from torch import nn

from thunder_memsave.config import ConfigError, Fp8Config, StrategyConfig
from thunder_memsave.fp8.linears import Fp8Linears, choose_linears, frozen_in_fp8
from thunder_memsave.fp8.recipe import RecipeName, recipe_of
from thunder_memsave.fp8.torch_support import Chip, why_not, why_not_on
from thunder_memsave.planner.graph import Device
from thunder_memsave.target_device import stand_in_fp8


def planned_fp8(model: nn.Module, strategy: StrategyConfig) -> Fp8Linears | None:
    """Choose the linears of a model of which nothing is in memory; None: nothing runs in fp8.

    Args:
        model: Made by `stand_in`.
        strategy: Which of them, and how.

    Raises:
        ConfigError: none would compute in fp8.
    """
    fp8 = strategy.fp8
    if fp8 is None:
        return None
    choices = choose_linears(model, fp8, frontend=strategy.compile.frontend)
    # The tensors of both backends are the same, and nothing is computed here.
    backend = "torch" if fp8.backend == "auto" else fp8.backend
    frozen = frozen_in_fp8(model, fp8, frontend=strategy.compile.frontend, data_parallel=None)
    if frozen is not None:
        frozen.stand_in()
    linears = Fp8Linears(model, choices, recipe=recipe_of(fp8), backend=backend)
    stand_in_fp8(linears)
    return linears


def refuse_without_fp8(fp8: Fp8Config | None, device: Device) -> None:
    """Refuse a device that does not compute what the run asks for.

    Raises:
        ConfigError: says what the device lacks.
    """
    if fp8 is not None and (reason := _why_not(device, fp8.recipe)) is not None:
        raise ConfigError(
            f"fp8.recipe is {fp8.recipe}, but {reason}; or plan for another --device.",
            key="fp8.recipe",
        )


def _why_not(device: Device, recipe: RecipeName) -> str | None:
    """By PyTorch's kernels; TransformerEngine's compute no more that this version asks them for."""
    if device.compute_capability is None:
        return why_not(recipe, torch.device(device.name))
    chip = Chip(name=f"the device {device.name}", capability=device.compute_capability)
    return why_not_on(chip, recipe)
