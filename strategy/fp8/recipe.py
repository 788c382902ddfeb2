"""The fp8 recipes: which dtype and which scaling each tensor of a linear gets.

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

NEEDS_BLACKWELL = ("mxfp8", "nvfp4")
"""Recipes whose GEMMs are instructions of compute capability 10.0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How the tensors of a linear are scaled and cast."""

    name: RecipeName
    """`delayed`: a scale per tensor, from the amax of earlier steps; `current`: from its own; `block`: a scale per
    1x128 elements of inputs and gradients, and per 128x128 of weights, powers of 2."""

    fp8_format: Literal["HYBRID", "E4M3"]
    """`HYBRID`: gradients are e5m2, which has a larger range and a bit less; all else is e4m3."""

    amax_history_len: int
    """Steps that the scales of `delayed` look back."""

    amax_compute_algo: Literal["max", "most_recent"]
    """Which amax of those steps counts."""

    margin: int
    """Scales of `delayed` are 2**margin smaller than what would just fit."""

    reduce_amax: bool
    """Whether `delayed` takes the largest amax of all ranks."""

    def dtype(self, role: Role) -> torch.dtype:
        """The fp8 type of the input, the weight or the gradient of the output."""
        if self.fp8_format == "HYBRID" and role == "grad":
            return torch.float8_e5m2
        return torch.float8_e4m3fn

    def use_fast_accum(self, product: Product) -> bool:
        """Whether a GEMM may add up with fewer bits: as in TransformerEngine, forward's with a scale per tensor."""
        return product == "forward" and self.name != "block"


def recipe_of(config: Fp8Config) -> Recipe:
    """The recipe that a configuration asks for."""
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
    """Refuse scales that differ from rank to rank: a checkpoint holds one model, with those of rank 0.

    Args:
        config: Of the linears that compute in fp8; None: none does.
        num_ranks: That train the model.

    Raises:
        ConfigError: each rank would have scales of its own.
    """
    if config is None or config.reduce_amax or num_ranks == 1:
        return
    raise ConfigError(
        f"fp8.reduce_amax is false, and there are {num_ranks} ranks, each of which would have scales of its own, while "
        "a checkpoint holds those of rank 0 alone: a resumed run would not be the one that was saved; leave "
        "reduce_amax out, which is true then, or train on one rank.",
        key="fp8.reduce_amax",
    )
