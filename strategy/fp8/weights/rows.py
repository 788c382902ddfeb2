"""Casts a rank's rows of a weight to fp8 by the scale of the whole weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thunder_memsave.fp8.kernels import torch_backend
from thunder_memsave.fp8.kernels.torch_backend import BLOCK
from thunder_memsave.fp8.recipe import Recipe
from thunder_memsave.sharding.rows import local_rows, whole_shape
from thunder_memsave.sharding.sharded_parameter import ShardedParameter


def shape_of_scales(shape: torch.Size, recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of a weight's inverse scales: one for all of it, or one for each block."""
    if recipe.name != "block":
        return (1,)
    return torch_backend.block_scales_shape(shape[0], shape[1], BLOCK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A rank's rows of a weight, on the device."""

    values: Tensor
    """`[rows, columns]` without padding; may be empty."""
    first: int
    num_rows: int
    """Number of rows, padding included."""
    whole: torch.Size

    @classmethod
    def of(cls, weight: Tensor, device: torch.device) -> Rows:
        """Return the rows of a weight that has values, sharded or not."""
        first = weight._first_row if isinstance(weight, ShardedParameter) else 0
        values = local_rows(weight, weight).to(device)
        return cls(values=values, first=first, num_rows=weight.shape[0], whole=whole_shape(weight))

    def amax(self, recipe: Recipe) -> Tensor:
        """Return these rows' part of the amax of the whole, or of each of its blocks; 0 for other blocks."""
        found = self.values.new_zeros(shape_of_scales(self.whole, recipe), dtype=torch.float32)
        if self.values.numel() == 0:
            return found
        if recipe.name == "block":
            found[self._blocks].copy_(torch_backend.block_amax(self._from_a_block(), BLOCK, BLOCK))
        else:
            found.copy_(torch_backend.amax(self.values))
        return found

    def quantized(self, amax: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
        """Return these rows in fp8, padded with zeros, and the inverse scales of the whole."""
        dtype = recipe.dtype("weight")
        if recipe.name == "block":
            scales = torch_backend.block_scales(amax, dtype, of=self.values.dtype)
        else:
            scales = torch_backend.current_scale(amax, dtype)
        if self.values.shape[0] == self.num_rows:
            return self._cast(scales, dtype), scales.reciprocal()
        padded = self.values.new_zeros((self.num_rows, *self.whole[1:]), dtype=dtype)
        if self.values.numel():
            padded[: self.values.shape[0]] = self._cast(scales, dtype)
        return padded, scales.reciprocal()

    def _cast(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if scales.dim() < 2:
            return torch_backend.cast(self.values, scales, dtype)
        own = torch_backend.cast_blocks(self._from_a_block(), scales[self._blocks], dtype, BLOCK)
        return own[self.first % BLOCK :].contiguous()

    @property
    def _blocks(self) -> slice:
        """The rows of blocks that these rows overlap."""
        return slice(self.first // BLOCK, -(-(self.first + self.values.shape[0]) // BLOCK))

    def _from_a_block(self) -> Tensor:
        """Return the rows, padded with zeros in front up to the start of a block."""
        return nn.functional.pad(self.values, (0, 0, self.first % BLOCK, 0))
