"""The linears of a planned run that compute in fp8, on a device that need not be here."""

from __future__ import annotations

from torch import nn

from thunder_memsave.config import ConfigError, Fp8Config, StrategyConfig
from thunder_memsave.fp8.linears import Fp8Linears, choose_linears, frozen_in_fp8
from thunder_memsave.fp8.recipe import NEEDS_BLACKWELL, recipe_of
from thunder_memsave.planner.graph import Device
from thunder_memsave.target_device import stand_in_fp8

_FP8 = "float8_e4m3fn"
_MULTIPLIES_BLOCKS = ("h100", "h200", "cpu")
"""By either backend; what TransformerEngine does of it on Blackwell is another format."""


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
    if fp8 is None:
        return
    if device.name != "cpu" and _FP8 not in device.flops_per_s:
        raise ConfigError(
            f"fp8 is set, but the device {device.name} does not multiply fp8 numbers; plan for another --device, such "
            "as h100, or leave fp8 out.",
            key="fp8",
        )
    if fp8.recipe in NEEDS_BLACKWELL or (
        fp8.recipe == "block" and device.name not in _MULTIPLIES_BLOCKS
    ):
        raise ConfigError(
            f"fp8.recipe is {fp8.recipe!r}, which this version does not compute on the device {device.name}; set "
            "fp8.recipe to 'current', or plan for another --device.",
            key="fp8.recipe",
        )
