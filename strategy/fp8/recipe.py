"""The fp8 recipes: the dtype and the scaling of each tensor of a linear.

They are TransformerEngine's, under its names for their options (transformer_engine/common/recipe/__init__.py):
`delayed` is `DelayedScaling`, `current` is `Float8CurrentScaling`, `block` is `Float8BlockScaling`, `mxfp8` is
`MXFP8BlockScaling` and `nvfp4` is `NVFP4BlockScaling`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from thunder_memsave.config import ConfigError, Fp8Config

RecipeName = Literal["delayed", "current", "block", "mxfp8", "nvfp4"]
Role = Literal["input", "weight", "grad"]
Product = Literal["forward", "grad_input", "grad_weight"]
Scaling = Literal["tensor", "block", "mx", "nvfp4"]

NEEDS_BLACKWELL = ("mxfp8", "nvfp4")
"""Recipes whose GEMMs are instructions of compute capability 10.0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The scaling and the dtypes of the tensors of a linear."""

    name: RecipeName
    """`delayed`: a scale per tensor, from the amax of earlier steps; `current`: a scale per tensor, from its own amax;
    `block`: a power of 2 per 1x128 elements of inputs and gradients, and per 128x128 elements of weights; `mxfp8`: a
    power of 2 per 1x32 elements of all tensors, along the dim that a product sums over; `nvfp4`: numbers of 4 bits
    with an e4m3 scale per 1x16 elements along that dim, and per 16x16 of weights, beside the tensor's amax."""

    fp8_format: Literal["HYBRID", "E4M3"]
    """`HYBRID`: gradients are e5m2, with a larger range and one mantissa bit less; all else is e4m3."""

    amax_history_len: int
    """Number of steps whose amax `delayed` considers."""

    amax_compute_algo: Literal["max", "most_recent"]
    """The amax that `delayed` takes from those steps."""

    margin: int
    """Headroom of `delayed`: scales are 2**margin smaller than the largest that fits."""

    reduce_amax: bool
    """Whether `delayed` takes the largest amax of all ranks."""

    @property
    def scaling(self) -> Scaling:
        """What has a scale of its own: a tensor, 1x128 or 128x128 elements, or 32 or 16 along the summed dim."""
        if self.name in ("block", "nvfp4"):
            return self.name
        return "mx" if self.name == "mxfp8" else "tensor"

    @property
    def casts_each_direction(self) -> bool:
        """Whether a transpose is cast from the values, along the dim that its product sums over."""
        return self.scaling in ("mx", "nvfp4")

    def dtype(self, role: Role) -> torch.dtype:
        """Return the fp8 dtype of the input, the weight or the output's gradient; of `nvfp4`, that of scales."""
        if self.fp8_format == "HYBRID" and role == "grad":
            return torch.float8_e5m2
        return torch.float8_e4m3fn

    def use_fast_accum(self, product: Product) -> bool:
        """Return whether a GEMM may accumulate in fewer bits: like TransformerEngine, forward's but with `block`."""
        return product == "forward" and self.name != "block"


def recipe_of(config: Fp8Config) -> Recipe:
    """Return the recipe of a configuration."""
    own_format: Literal["HYBRID", "E4M3"] = (
        "HYBRID" if config.recipe in ("delayed", "current") else "E4M3"
    )
    return Recipe(
        name=config.recipe,
        fp8_format=config.fp8_format or own_format,
        amax_history_len=config.amax_history_len,
        amax_compute_algo=config.amax_compute_algo,
        margin=config.margin,
        reduce_amax=config.reduce_amax,
    )


def refuse_own_scales(config: Fp8Config | None, *, num_ranks: int) -> None:
    """Refuse scales that differ between ranks, because a checkpoint holds only those of rank 0.

    Args:
        config: The `fp8` section; None: no linear computes in fp8.
        num_ranks: The number of ranks that train the model.

    Raises:
        ConfigError: Each rank would have its own scales.
    """
    if config is None or config.reduce_amax or num_ranks == 1:
        return
    raise ConfigError(
        f"fp8.reduce_amax is false, and there are {num_ranks} ranks, each of which would have scales of its own, while "
        "a checkpoint holds those of rank 0 alone: a resumed run would not be the one that was saved; leave "
        "reduce_amax out, which is true then, or train on one rank.",
        key="fp8.reduce_amax",
    )
