"""Tells whether PyTorch's kernels support a recipe on a chip, and if not, what is missing and what to do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from packaging.version import Version

from thunder_memsave.fp8.recipe import NEEDS_BLACKWELL, RecipeName

ADA, HOPPER, _BLACKWELL = (8, 9), (9, 0), (10, 0)
"""The first compute capability of each architecture; those before Ada have no fp8."""

_AFTER_MX = (12, 0)
"""The first compute capability after those on which TransformerEngine computes mxfp8: `_compute_mxfp8_support` in
transformer_engine/pytorch/quantization.py."""

_AFTER_NVFP4 = (11, 0)
"""The first compute capability after those that have instructions for stochastic rounding to 4 bits:
`ARCH_HAS_STOCHASTIC_ROUNDING` in transformer_engine/common/util/ptx.cuh."""

_CUDA_OF_BLOCKS = "12.9"
"""The first CUDA version whose cuBLAS supports scales of blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A CUDA GPU, present or planned for."""

    name: str
    capability: tuple[int, int]
    """CUDA's compute capability."""
    cuda: str | None = None
    """The version of CUDA; None: any."""

    def __str__(self) -> str:
        with_cuda = "" if self.cuda is None else f", with CUDA {self.cuda}"
        return f"{self.name} (compute capability {dotted(self.capability)}{with_cuda})"


def chip_of(device: torch.device) -> Chip:
    """Return the GPU of a CUDA device."""
    return Chip(
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        cuda=torch.version.cuda or "0",
    )


def why_not(recipe: RecipeName, device: torch.device) -> str | None:
    """Return why PyTorch's kernels cannot compute `recipe` on `device`, and what to do; None: they can."""
    if device.type == "cuda":
        return why_not_on(chip_of(device), recipe)
    if device.type == "cpu":
        return None
    return f"it computes on CUDA devices and on the CPU, and the model is on {device.type}: leave out `fp8`"


def why_not_on(chip: Chip, recipe: RecipeName) -> str | None:
    """Return the same for a chip that need not be present."""
    if recipe in NEEDS_BLACKWELL:
        return why_not_on_blackwell(chip, recipe) or (
            f"TransformerEngine alone multiplies in {recipe} on CUDA devices: `pip install 'thunder-memsave[te]'` and "
            "set `fp8.backend: transformer_engine`, or set `fp8.recipe: current`"
        )
    if chip.capability < ADA:
        return (
            f"torch._scaled_mm needs compute capability {dotted(ADA)} (Ada, Hopper or later), and there is {chip}: "
            "leave out `fp8`"
        )
    is_old = chip.cuda is not None and Version(chip.cuda) < Version(_CUDA_OF_BLOCKS)
    if recipe == "block" and (chip.capability[0] != HOPPER[0] or is_old):
        return (
            f"torch._scaled_mm multiplies such blocks on compute capability {dotted(HOPPER)} (Hopper), from CUDA "
            f"{_CUDA_OF_BLOCKS} on, and there is {chip}: set `fp8.recipe: current`"
        )
    return None


def why_not_on_blackwell(chip: Chip, recipe: RecipeName) -> str | None:
    """Return why TransformerEngine does not compute one of the recipes of Blackwell on a chip; None: it does."""
    if chip.capability < _BLACKWELL:
        return (
            f"{recipe} needs compute capability {dotted(_BLACKWELL)} (Blackwell), and there is {chip}: set "
            "`fp8.recipe` to delayed, current or block"
        )
    if recipe == "nvfp4":
        return _why_not_rounded(chip)
    if chip.capability >= _AFTER_MX:
        return (
            f"TransformerEngine computes mxfp8 on compute capability {dotted(_BLACKWELL)} and others below "
            f"{dotted(_AFTER_MX)}, and there is {chip}: set `fp8.recipe: current`"
        )
    return None


def dotted(capability: tuple[int, int]) -> str:
    """Write a compute capability as CUDA does."""
    return ".".join(map(str, capability))


def _why_not_rounded(chip: Chip) -> str | None:
    """Return why gradients cannot be rounded stochastically to 4 bits on Blackwell or a later chip."""
    if chip.capability < _AFTER_NVFP4:
        return None
    return (
        "nvfp4 needs the instructions of compute capability 10.x (Blackwell) that round stochastically, and there is "
        f"{chip}: set `fp8.recipe: current`"
    )
