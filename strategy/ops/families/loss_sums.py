"""Adds up the gradients of a loss in tiles: of hidden states where they are returned, of the head in a wide dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from thunder_memsave.aten.record import once_through_memory, turns_of
from thunder_memsave.ops.launches import losses as launches
from thunder_memsave.ops.launches.wide_products import add_wide_product

if TYPE_CHECKING:
    from thunder_memsave.ops.families.tiled_loss import Head, LaunchedTile, Tile

_PRODUCT_BYTES = 32 * 2**20
"""Bytes that a part of the weight's gradient of one tile may take, before it is added up in float32."""


class Wanted(NamedTuple):
    """The operands that get a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    adapter: bool = False


class Gradients(NamedTuple):
    """Tensors for the gradients of the operands; None: not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    adapter: Tensor | None = None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that losses are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Sums:
    """Adds up the gradients of all tiles where they are returned."""

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        wanted: Wanted,
        make: Callable[[], Gradients],
        *,
        is_on_cuda: bool,
    ) -> None:
        """Make zeros for the operands that are wanted."""
        self._make, self._is_on_cuda = make, is_on_cuda
        self.of = self._zeros(hidden, head, wanted)

    def _zeros(self, hidden: Tensor, head: Head, wanted: Wanted) -> Gradients:
        made = self._make()
        for gradient in made:
            if gradient is not None:
                gradient.zero_()
        return made

    def add(
        self,
        tile: Tile | LaunchedTile,
        hidden: Tensor,
        head: Head,
        rows: Tensor | slice,
        factors: Tensor,
    ) -> None:
        """Add the gradients of a tile of these hidden states."""
        of_logits = tile.of_logits(factors)
        if self.of.bias is not None:
            self.of.bias.add_(tile.values.sum(0, dtype=wide_dtype(hidden.dtype)))
        del tile.values
        weight, _, adapter = head
        width = weight.shape[1]
        if self.of.hidden is not None:
            self.of.hidden[rows, :width] = of_logits @ weight
            if adapter is not None:
                self.of.hidden[rows, width:] = of_logits @ adapter
        if self.of.weight is not None:
            self._add_product(self.of.weight, of_logits.T, hidden[:, :width])
        if self.of.adapter is not None:
            self._add_product(self.of.adapter, of_logits.T, hidden[:, width:])

    def _add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """Add `left @ right`; where the total is wider, without a whole product beside it."""
        if total.dtype is right.dtype:
            # Its FLOPs are counted, those of `addmm_` not.
            torch.addmm(total, left, right, out=total)
        elif self._is_on_cuda:
            with once_through_memory(total, total, left, right):
                add_wide_product(total, left, right)
        else:
            for rows in parts_of(total):
                total[rows].add_(left[rows] @ right)

    def finish(self) -> None:
        """Leave the sums in what is returned: they are there."""


class WideSums(Sums):
    """Adds up the gradients of the head in a wide dtype, and rounds them to what is returned, which is made then."""

    @override
    def _zeros(self, hidden: Tensor, head: Head, wanted: Wanted) -> Gradients:
        wide = wide_dtype(hidden.dtype)
        dtypes = (hidden.dtype, wide, wide, wide)
        return Gradients(
            *(
                like.new_zeros(like.shape, dtype=dtype) if w and like is not None else None
                for like, dtype, w in zip((hidden, *head), dtypes, wanted, strict=True)
            )
        )

    @override
    def finish(self) -> None:
        for result, total in zip(self._make(), self.of, strict=True):
            if result is not None and total is not None:
                result.copy_(total)


def multiplied(value: Tensor, factor: Tensor, *, in_one_launch: bool = False) -> Tensor:
    """Return `value * factor` in its dtype, without a whole copy in the factor's, which may be wider.

    `in_one_launch`: whether Triton may compute it, for values of 16 bits.
    """
    is_of_rows = factor.numel() in (1, value.shape[0])
    if in_one_launch and factor.dtype is torch.float32 and is_of_rows:
        return launches.scaled_rows(value.contiguous(), factor.reshape(-1).contiguous())
    result = torch.empty_like(value, memory_format=torch.contiguous_format)
    factor = factor.reshape(-1, *[1] * (value.ndim - 1))
    if value.dtype is factor.dtype:
        return torch.mul(value, factor, out=result)
    for rows in parts_of(value):
        of_rows = factor[rows] if factor.shape[0] == value.shape[0] else factor
        result[rows] = value[rows].to(factor.dtype).mul_(of_rows)
    return result


def parts_of(value: Tensor) -> Iterator[slice]:
    """Yield rows of which a copy in float32 has `_PRODUCT_BYTES` at most."""
    step = max(1, _PRODUCT_BYTES // (4 * value[0].numel() or 1)) if value.shape[0] else 1
    for start in turns_of(range(0, value.shape[0], step), value):
        yield slice(start, start + step)
