"""Cross-entropy of the results of a linear layer in fp8, in tiles of tokens: its losses, and their gradients.

Hidden states and weight are cast whole, before: they are small beside the logits. The gradients of logits are cast
tile by tile, to the numbers that they would have if all were cast at once:

    delayed    the scale is known before the first tile; each tile raises the recorded amax
    current    the scale needs the amax of all tiles: where there are several, backward computes all logits for it, and
               then again for the casts
    block      for the weight's gradient, a block is 128 tokens long, so a tile has a multiple of 128 tokens
    mxfp8      a block is 32 tokens long, and a tile has a multiple of 128 tokens too
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from thunder_memsave.ops.families.loss_sums import Gradients, Wanted, parts_of, wide_dtype
from thunder_memsave.ops.families.tiled_loss import (
    LossOptions,
    Tile,
    kept_places,
    num_computed,
    tiles_of,
)

BLOCK = 128
"""Tokens of a block of a transposed matrix; four blocks of `mx`."""

Scaling = Literal["tensor", "block", "mx"]
"""What has a scale of its own: a tensor, 1x128 elements, or 1x32 elements."""


class Fp8Kernels(Protocol):
    """The functions of a backend, as `fp8/kernels/torch_backend.py` describes them."""

    def quantize_delayed(  # noqa: D102
        self,
        x: Tensor,
        scale: Tensor,
        history: Tensor,
        index: int,
        dtype: torch.dtype,
        records: bool,
    ) -> tuple[Tensor, Tensor]: ...
    def quantize_current(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...  # noqa: D102
    def quantize_block(  # noqa: D102
        self, x: Tensor, dtype: torch.dtype, block_rows: int, block_cols: int
    ) -> tuple[Tensor, Tensor]: ...
    def quantize_mx(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...  # noqa: D102
    def quantize_mx_columns(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]: ...  # noqa: D102
    def transpose(self, q: Tensor) -> Tensor: ...  # noqa: D102
    def amax(self, x: Tensor) -> Tensor: ...  # noqa: D102
    def current_scale(self, amax: Tensor, dtype: torch.dtype) -> Tensor: ...  # noqa: D102
    def gemm(  # noqa: D102
        self,
        a: Tensor,
        a_scale_inv: Tensor,
        b: Tensor,
        b_scale_inv: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in fp8."""

    data: Tensor
    scale_inv: Tensor
    """float32 `[1]`, or the inverse scales of blocks, uint8 for those of `mx`."""

    def rows(self, rows: Tensor | slice) -> Quantized:
        """Return some rows; scales of blocks are those of blocks of one row."""
        # As bytes, which every device can gather.
        data = self.data.view(torch.uint8)[rows].view(self.data.dtype)
        return Quantized(data, self.scale_inv if self.scale_inv.ndim < 2 else self.scale_inv[rows])


@dataclass(frozen=True, slots=True)
class Fp8Head:
    """The linear layer: what makes logits of hidden states in fp8."""

    weight: Quantized
    """(classes, width)."""
    bias: Tensor | None
    """(classes,), in `dtype`."""
    dtype: torch.dtype
    """Of the logits."""
    use_fast_accum: bool
    """Whether forward's product may accumulate in fewer bits."""
    kernels: Fp8Kernels

    def logits(self, hidden: Quantized) -> Tensor:
        """Return (tokens, classes)."""
        return self.product(hidden, self.weight, self.dtype, self.bias, fast=self.use_fast_accum)

    def product(
        self,
        a: Quantized,
        b: Quantized,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        fast: bool = False,
    ) -> Tensor:
        """Return `a @ b.t() + bias`."""
        operands = (a.data, a.scale_inv, b.data, b.scale_inv)
        return self.kernels.gemm(*operands, bias, dtype, fast)


@dataclass(frozen=True, slots=True)
class GradientCast:
    """How gradients of logits are cast."""

    dtype: torch.dtype
    """One of fp8."""
    scaling: Scaling
    scale: Tensor | None = None
    """float32 `[1]`, of the recipe `delayed`; None: it comes from the gradients."""
    history: Tensor | None = None
    """Its amax histories, float32 `[length, 1]`."""
    records: bool = False
    """Whether the first of them is raised to the amax of the gradients."""


def fp8_losses_in_tiles(
    hidden: Quantized,
    head: Fp8Head,
    targets: Tensor,
    options: LossOptions,
    *,
    num_kept: Tensor | None,
    rows_per_tile: int,
) -> Tensor:
    """Return the loss of each token, float32; 0 where it is ignored.

    Args:
        hidden: (tokens, width).
        head: The linear layer.
        targets: (tokens,), int64; `IGNORED` has no loss.
        options: Of the loss.
        num_kept: As `tiled_loss.losses_in_tiles` has it.
        rows_per_tile: Tokens whose logits exist at a time.
    """
    losses = torch.zeros(targets.shape, dtype=wide_dtype(head.dtype), device=targets.device)
    for rows in tiles_of(targets, kept_places(targets, num_kept), rows_per_tile):
        tile = Tile(head.logits(hidden.rows(rows)), targets[rows], options)
        losses[rows] = tile.losses()
        del tile  # before the next one's logits
    return losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8LossGradients:
    """The gradients of a loss by hidden states, weight and bias."""

    hidden: Quantized
    """(tokens, width)."""
    whole_hidden: Tensor | None
    """The same before the cast, where blocks along the tokens are cast for the weight's gradient."""
    head: Fp8Head
    transposed: Quantized | None
    """(width, classes); None: hidden states get no gradient."""
    targets: Tensor
    options: LossOptions
    factors: Tensor
    """What each token's loss is multiplied by: a number, or (tokens,)."""
    cast: GradientCast
    wanted: Wanted

    def in_tiles(self, num_kept: Tensor | None, rows_per_tile: int) -> Gradients:
        """Return them in the dtype of the logits.

        Args:
            num_kept: As `tiled_loss.losses_in_tiles` has it. Blocks along the tokens have all of them.
            rows_per_tile: Tokens whose logits exist at a time; rounded up to whole blocks, where there are.
        """
        has_blocks = self.whole_hidden is not None
        step = -(-rows_per_tile // BLOCK) * BLOCK if has_blocks else rows_per_tile
        places = None if has_blocks else kept_places(self.targets, num_kept)
        is_one = 0 < num_computed(self.targets, places) <= step
        scale = self.cast.scale if is_one else self._scale(tiles_of(self.targets, places, step))
        sums = _Fp8Sums(self, is_one=is_one)
        for rows in tiles_of(self.targets, places, step):
            sums.add(rows, scale)
        return sums.finished()

    def _scale(self, tiles: Iterable[Tensor | slice]) -> Tensor | None:
        """Return the scale of all gradients of logits; None: each block has its own."""
        cast = self.cast
        if cast.scaling != "tensor" or cast.scale is not None:
            return cast.scale
        kernels = self.head.kernels
        largest = torch.zeros((), dtype=torch.float32, device=self.targets.device)
        for rows in tiles:
            largest = torch.maximum(largest, kernels.amax(self.of_logits(rows)))
        return kernels.current_scale(largest, cast.dtype)

    def of_logits(self, rows: Tensor | slice) -> Tensor:
        """Return the gradients of a tile's logits."""
        logits = self.head.logits(self.hidden.rows(rows))
        tile = Tile(logits, self.targets[rows], self.options)
        del logits
        tile.losses()
        return tile.of_logits(self.factors[rows] if self.factors.ndim else self.factors)

    def quantized(self, of_logits: Tensor, scale: Tensor | None) -> Quantized:
        """Cast the gradients of a tile's logits; `scale`: of them all; None: they are all, or blocks have their own."""
        kernels, cast = self.head.kernels, self.cast
        if cast.scaling == "mx":
            return Quantized(*kernels.quantize_mx(of_logits, cast.dtype))
        if cast.scaling == "block":
            return Quantized(*kernels.quantize_block(of_logits, cast.dtype, 1, BLOCK))
        if scale is None:
            return Quantized(*kernels.quantize_current(of_logits, cast.dtype))
        history = scale if cast.history is None else cast.history
        records = cast.records and cast.history is not None
        found = kernels.quantize_delayed(of_logits, scale, history, 0, cast.dtype, records)
        return Quantized(*found)


class _Fp8Sums:
    """Adds up the gradients of all tiles, in float32 where there are several."""

    def __init__(self, of: Fp8LossGradients, *, is_one: bool) -> None:
        self._of, self._is_one = of, is_one
        (num_classes, width), head = of.head.weight.data.shape, of.head
        device, num_tokens = of.targets.device, of.targets.numel()
        wide = wide_dtype(head.dtype)
        self._hidden = self._weight = self._bias = None
        if of.wanted.hidden:
            self._hidden = torch.zeros(num_tokens, width, dtype=head.dtype, device=device)
        if of.wanted.weight and not is_one:
            self._weight = torch.zeros(num_classes, width, dtype=wide, device=device)
        if of.wanted.bias:
            self._bias = torch.zeros(num_classes, dtype=wide, device=device)

    def add(self, rows: Tensor | slice, scale: Tensor | None) -> None:
        """Add the gradients of a tile; `scale` is that of all of them, as `quantized` takes it."""
        of, head = self._of, self._of.head
        of_logits = of.of_logits(rows)
        if self._bias is not None:
            self._bias.add_(of_logits.sum(0, dtype=self._bias.dtype))
        quantized = of.quantized(of_logits, scale)
        columns = self._columns(quantized, of_logits) if of.wanted.weight else None
        del of_logits
        if self._hidden is not None:
            assert of.transposed is not None
            self._hidden[rows] = head.product(quantized, of.transposed, head.dtype)
        del quantized
        if columns is not None:
            self._add_product(columns, self._columns_of_hidden(rows))

    def finished(self) -> Gradients:
        """Return the sums in the dtype of the logits."""
        sums = (self._weight, self._bias)
        weight, bias = (None if s is None else s.to(self._of.head.dtype) for s in sums)
        return Gradients(self._hidden, weight, bias)

    def _columns(self, quantized: Quantized, of_logits: Tensor) -> Quantized:
        """Return the gradients of a tile's logits with the tokens as the last dim."""
        cast, kernels = self._of.cast, self._of.head.kernels
        if cast.scaling == "mx":
            return Quantized(*kernels.quantize_mx_columns(of_logits, cast.dtype))
        if cast.scaling == "block":
            return self._of.quantized(of_logits.t().contiguous(), None)
        return Quantized(kernels.transpose(quantized.data), quantized.scale_inv)

    def _columns_of_hidden(self, rows: Tensor | slice) -> Quantized:
        of, kernels = self._of, self._of.head.kernels
        if of.whole_hidden is not None and of.cast.scaling == "mx":
            whole = of.whole_hidden[rows]
            return Quantized(*kernels.quantize_mx_columns(whole, of.hidden.data.dtype))
        if of.whole_hidden is not None:
            columns = of.whole_hidden[rows].t().contiguous()
            return Quantized(*kernels.quantize_block(columns, of.hidden.data.dtype, 1, BLOCK))
        hidden = of.hidden.rows(rows)
        return Quantized(kernels.transpose(hidden.data), hidden.scale_inv)

    def _add_product(self, left: Quantized, right: Quantized) -> None:
        """Add `left @ right.t()`, by parts of its rows, so that no whole product is made beside the sum."""
        head = self._of.head
        if self._is_one:
            self._weight = head.product(left, right, head.dtype)
            return
        assert self._weight is not None
        for rows in parts_of(self._weight):
            self._weight[rows].add_(head.product(left.rows(rows), right, self._weight.dtype))
