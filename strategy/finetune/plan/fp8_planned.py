"""The fp8 linears of a planned run, on a device that need not be present."""

from __future__ import annotations

import torch
from torch import nn

from thunder_memsave.budget.target.device import stand_in_fp8
from thunder_memsave.config import ConfigError, Fp8Config, StrategyConfig
from thunder_memsave.fp8.compute.linears import Fp8Linears, choose_linears, frozen_in_fp8
from thunder_memsave.fp8.compute.operators import Backend
from thunder_memsave.fp8.kernels import te_backend
from thunder_memsave.fp8.kernels.torch_support import ADA, Chip, dotted, why_not, why_not_on
from thunder_memsave.fp8.recipe import RecipeName, recipe_of
from thunder_memsave.planner.graph import Device


def planned_fp8(
    model: nn.Module, strategy: StrategyConfig, device: Device | None = None
) -> Fp8Linears | None:
    """Choose the fp8 linears of a model without values; None if fp8 is off.

    Args:
        model: The result of `stand_in`.
        strategy: Its `fp8` says which linears, and how.
        device: The device that will compute; None: only the weights matter.

    Raises:
        ConfigError: no linear would compute in fp8.
    """
    fp8 = strategy.fp8
    if fp8 is None:
        return None
    choices = choose_linears(model, fp8)
    frozen = frozen_in_fp8(model, fp8, data_parallel=None)
    if frozen is not None:
        frozen.stand_in()
    backend = _backend(fp8, device)
    linears = Fp8Linears(model, choices, recipe=recipe_of(fp8), backend=backend)
    stand_in_fp8(linears)
    return linears


def _backend(fp8: Fp8Config, device: Device | None) -> Backend:
    """Return whose tensors are planned: with `auto`, PyTorch's, which are the same, where it computes the recipe."""
    if fp8.backend != "auto":
        return fp8.backend
    is_torch = device is None or _why_not("torch", fp8.recipe, device) is None
    return "torch" if is_torch else "transformer_engine"


def by_transformer_engine(fp8: Fp8Config | None, device: Device) -> bool:
    """Return whether TransformerEngine computes the fp8 products; with `backend: auto`, where it is installed."""
    if fp8 is None or "transformer_engine" not in _BACKENDS[fp8.backend]:
        return False
    return _why_not("transformer_engine", fp8.recipe, device) is None


def refuse_without_fp8(fp8: Fp8Config | None, device: Device) -> None:
    """Refuse a device that cannot compute the run's fp8 settings.

    `backend: auto` is refused if neither backend can, because it is not known which one will be installed.

    Raises:
        ConfigError: the device lacks something; the message says what.
    """
    if fp8 is None:
        return
    chip = _chip_of(device)
    if chip is not None and chip.capability < ADA:
        raise ConfigError(
            f"fp8 is set, but nothing computes in fp8 below compute capability {dotted(ADA)} (Ada), and there is "
            f"{chip}: leave out `fp8`; or plan for another --device.",
            key="fp8",
        )
    reasons = [_why_not(backend, fp8.recipe, device) for backend in _BACKENDS[fp8.backend]]
    if all(reasons):
        is_of_backend = chip is None and fp8.backend == "transformer_engine"
        raise ConfigError(
            f"fp8.backend is {fp8.backend} and fp8.recipe is {fp8.recipe}, but {reasons[0]}; or plan for another "
            "--device.",
            key="fp8.backend" if is_of_backend else "fp8.recipe",
        )


_BACKENDS: dict[str, tuple[Backend, ...]] = {
    "auto": ("torch", "transformer_engine"),
    "torch": ("torch",),
    "transformer_engine": ("transformer_engine",),
}


def _why_not(backend: Backend, recipe: RecipeName, device: Device) -> str | None:
    chip = _chip_of(device)
    if backend == "transformer_engine":
        return te_backend.why_not_on(chip, recipe)
    return why_not(recipe, torch.device(device.name)) if chip is None else why_not_on(chip, recipe)


def _chip_of(device: Device) -> Chip | None:
    """Return the device's chip; None for a CPU."""
    if device.compute_capability is None:
        return None
    return Chip(name=f"the device {device.name}", capability=device.compute_capability)
