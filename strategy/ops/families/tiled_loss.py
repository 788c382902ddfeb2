"""Cross-entropy of a linear layer's results in tiles of tokens: the logits never exist whole, nor do their gradients.

The losses, and with `wanted` their gradients by hidden states, weight and bias for a cotangent of one, come from one
pass: each tile has its logits once. All after the products is computed in float32, in float64 for float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from thunder_memsave.aten.record import once_through_memory, turns_of

IGNORED = -100
"""The target of tokens that have no loss."""
TILE_BYTES = 192 * 2**20
"""Bytes that the logits of a tile may take, with their copies; more beside the sum of a large weight's gradients."""
_PRODUCT_BYTES = 32 * 2**20
"""Bytes that a part of the weight's gradient of one tile may take, before it is added up in float32."""


class Wanted(NamedTuple):
    """The operands that get a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    adapter: bool = False


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Terms and factors of a loss beyond cross-entropy."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    """Factor of the squared logarithm of the softmax's denominator, which is added to each token's loss."""
    soft_cap: float | None = None
    """Logits are `soft_cap * tanh(logits / soft_cap)`."""
    logit_scale: float = 1.0
    """Factor of the logits, before they are capped."""


class Gradients(NamedTuple):
    """Tensors for the gradients of the operands; None: not wanted."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    adapter: Tensor | None = None


class Head(NamedTuple):
    """The tensors that make logits of hidden states."""

    weight: Tensor
    """(classes, width)."""
    bias: Tensor | None = None
    """(classes,)."""
    adapter: Tensor | None = None
    """(classes, rank): the weight of what hidden states have after the first `width` elements."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (tokens, classes) of (tokens, width + rank)."""
        width = self.weight.shape[1]
        logits = F.linear(hidden[:, :width], self.weight, self.bias)
        if self.adapter is not None:
            torch.addmm(logits, hidden[:, width:], self.adapter.T, out=logits)
        return logits


class Sizes(NamedTuple):
    """Numbers of tokens, of elements of a hidden state, of classes, and of the elements that an adapter reads."""

    num_tokens: int
    width: int
    num_classes: int
    rank: int = 0

    def shapes(self, wanted: Wanted) -> list[tuple[int, ...] | None]:
        """Return the shapes of the gradients of hidden states, weight, bias and adapter."""
        num_tokens, width, num_classes, rank = self
        of_weight, of_adapter = (num_classes, width), (num_classes, rank)
        shapes = ((num_tokens, width + rank), of_weight, (num_classes,), of_adapter)
        return [shape if w else None for shape, w in zip(shapes, wanted, strict=True)]

    def num_elements(self, wanted: Wanted) -> int:
        """Return the elements of all gradients."""
        return sum(math.prod(shape) for shape in self.shapes(wanted) if shape is not None)


def gradients_in(flat: Tensor, sizes: Sizes, wanted: Wanted) -> Gradients:
    """Return the gradients that lie one after the other in `flat`."""
    parts: list[Tensor | None] = []
    start = 0
    for shape in sizes.shapes(wanted):
        end = start + (0 if shape is None else math.prod(shape))
        parts.append(None if shape is None else flat[start:end].view(shape))
        start = end
    return Gradients(*parts)


def tile_rows(
    num_tokens: int,
    num_classes: int,
    dtype: torch.dtype,
    options: LossOptions,
    *,
    more_bytes: int = 0,
    width: int = 0,
) -> int:
    """Return the tokens of a tile: as many as `TILE_BYTES` allow, in tiles of about one size.

    Each tile reads and writes the sum of the weight's gradients, so that tiles may take half of its bytes.

    Args:
        num_tokens: Of all tiles.
        num_classes: Logits of a token.
        dtype: Of the linear layer's results.
        options: Of the loss.
        more_bytes: What each logit takes beside its copy in a wide dtype and that in `dtype`.
        width: Of the weight, if it gets a gradient.
    """
    wide = wide_dtype(dtype).itemsize
    of_logit = wide * (1 + (options.soft_cap is not None)) + more_bytes
    of_logit += dtype.itemsize * (dtype.itemsize != wide)
    tile_bytes = max(TILE_BYTES, wide * num_classes * width // 2)
    most = max(1, tile_bytes // (num_classes * of_logit))
    num_tiles = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_tiles))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that losses are computed in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def losses_in_tiles(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    options: LossOptions,
    *,
    num_kept: Tensor | None = None,
    rows_per_tile: int,
    is_on_cuda: bool = False,
    factors: Tensor | None = None,
    gradients: Gradients | None = None,
) -> Tensor:
    """Return the loss of each token, 0 where it is ignored.

    Args:
        hidden: (tokens, width), with an adapter (tokens, width + rank).
        head: Of the same dtype.
        targets: (tokens,); `IGNORED` has no loss.
        options: Of the loss.
        num_kept: int64 scalar on the CPU: how many tokens have a loss; the others are not computed. None: they are not
            on a CPU, where they are counted.
        rows_per_tile: Tokens whose logits exist at a time.
        is_on_cuda: Whether this is, or is planned to be, on CUDA.
        factors: What each token's loss is multiplied by before it is differentiated, as a number or (tokens,).
        gradients: Are written, if given.
    """
    wide = wide_dtype(hidden.dtype)
    losses = torch.zeros(targets.shape, dtype=wide, device=hidden.device)
    places = kept_places(targets, num_kept)
    sums = None
    if gradients is not None:
        is_one = num_computed(targets, places) <= rows_per_tile
        sums = _Sums(gradients, wide, is_one=is_one, is_on_cuda=is_on_cuda)
    for rows in tiles_of(targets, places, rows_per_tile):
        of_rows = hidden[rows]
        tile = Tile(head.logits(of_rows), targets[rows], options)
        losses[rows] = tile.losses()
        if factors is not None and sums is not None:
            sums.add(tile, of_rows, head, rows, factors[rows] if factors.ndim else factors)
        del tile, of_rows  # before the next one's logits
    if sums is not None:
        sums.finish()
    return losses


def kept_places(targets: Tensor, num_kept: Tensor | None) -> Tensor | None:
    """Return the places of the tokens with a loss, in order; None: compute all, which needs no number on the host.

    Of tensors without numbers, all tokens have one: what is computed of fewer takes less memory. So have those of a
    graph that is captured, which would compute as many whenever it is replayed.
    """
    if isinstance(targets, FakeTensor):
        return (
            torch.argsort(targets, stable=True) if num_kept is not None or targets.is_cpu else None
        )
    if num_kept is None or (targets.is_cuda and torch.cuda.is_current_stream_capturing()):
        return (targets != IGNORED).nonzero().squeeze(1) if targets.is_cpu else None
    is_ignored = targets == IGNORED
    number = int(num_kept)
    first_left = torch.argsort(is_ignored, stable=True)
    if number < targets.numel():
        message = f"More than {number} targets are kept, which was given as their number"
        torch._assert_async(is_ignored[first_left[number]], message)
    return first_left[:number]


def num_computed(targets: Tensor, places: Tensor | None) -> int:
    """Return the number of tokens that are computed: of all, or of those at `places`."""
    return (targets if places is None else places).numel()


def tiles_of(targets: Tensor, places: Tensor | None, step: int) -> Iterator[Tensor | slice]:
    """Yield the rows of each tile of so many tokens: of all, or of those at `places`."""
    num_tokens = num_computed(targets, places)
    for start in turns_of(range(0, num_tokens, step), targets):
        rows = slice(start, min(start + step, num_tokens))
        yield rows if places is None else places[rows]


class Tile:
    """The logits of some tokens, and in their place later what is made of them."""

    def __init__(self, logits: Tensor, targets: Tensor, options: LossOptions) -> None:
        """Take the logits, which are overwritten where they have a wide dtype: (tokens, classes)."""
        self.options, self.dtype = options, logits.dtype
        self.is_kept = targets != IGNORED
        self.targets = targets.where(self.is_kept, 0).unsqueeze(1)
        self.values = logits.to(wide_dtype(logits.dtype))
        self.tanh: Tensor | None = None
        self.logarithm: Tensor | None = None
        """Logarithm of the softmax's denominator."""

    def losses(self) -> Tensor:
        """Return the tokens' losses, and leave logarithms of probabilities."""
        values, options = self.values, self.options
        if options.logit_scale != 1.0:
            values.mul_(options.logit_scale)
        if options.soft_cap is not None:
            self.tanh = values.div_(options.soft_cap).tanh_().clone()
            values.mul_(options.soft_cap)
        of_first = values[:, 0].clone()
        torch.ops.aten._log_softmax.out(values, -1, False, out=values)
        losses = -values.gather(1, self.targets).squeeze(1)
        if options.label_smoothing:
            losses.mul_(1.0 - options.label_smoothing)
            losses.sub_(values.sum(1), alpha=options.label_smoothing / values.shape[1])
        if options.z_loss:
            self.logarithm = of_first - values[:, 0]
            losses.add_(self.logarithm.square(), alpha=options.z_loss)
        return losses.masked_fill_(~self.is_kept, 0.0)

    def of_logits(self, factors: Tensor) -> Tensor:
        """Return the gradients of the linear layer's results, in its dtype; they are left in place of all else."""
        options, values = self.options, self.values.exp_()
        factors = torch.where(self.is_kept, factors, 0.0).to(values.dtype).unsqueeze(1)
        of_target = self._rounded_once(factors)
        if self.logarithm is None:
            values.mul_(factors)
        else:
            values.mul_(factors * (1.0 + 2.0 * options.z_loss * self.logarithm.unsqueeze(1)))
        if options.label_smoothing:
            values.sub_(factors * (options.label_smoothing / values.shape[1]))
        if of_target is None:
            of_target = values.gather(1, self.targets)
            of_target.sub_(factors * (1.0 - options.label_smoothing))
        values.scatter_(1, self.targets, of_target)
        if self.tanh is not None:
            values.mul_(self.tanh.square_().neg_().add_(1.0))
            self.tanh = None
        if options.logit_scale != 1.0:
            values.mul_(options.logit_scale)
        return values.to(self.dtype)

    def _rounded_once(self, factors: Tensor) -> Tensor | None:
        """Return the gradients of the targets' logits of plain cross-entropy, of probabilities; None: there is more.

        PyTorch's `log_softmax` multiplies and subtracts in one instruction, which rounds once. That is the largest
        gradient of a token, so that an amax has PyTorch's bits.
        """
        if self.logarithm is not None or self.options.label_smoothing:
            return None
        of_target, exact = self.values.gather(1, self.targets).double(), factors.double()
        return of_target.mul_(exact).sub_(exact).to(self.values.dtype)


class _Sums:
    """Adds up the gradients of all tiles: in a wide dtype, and in place where that is their own."""

    def __init__(
        self, gradients: Gradients, wide: torch.dtype, *, is_one: bool, is_on_cuda: bool
    ) -> None:
        """`is_one`: there is one tile at most, so that nothing is added up."""
        self.of, self._is_on_cuda = gradients, is_on_cuda
        if gradients.hidden is not None:
            gradients.hidden.zero_()
        wide_sum = None if is_one else wide
        self.weight, self.bias, self.adapter = (_sum_of(g, wide_sum) for g in gradients[1:])

    def add(
        self, tile: Tile, hidden: Tensor, head: Head, rows: Tensor | slice, factors: Tensor
    ) -> None:
        """Add the gradients of a tile of these hidden states."""
        of_logits = tile.of_logits(factors)
        if self.bias is not None:
            self.bias.add_(tile.values.sum(0))
        del tile.values
        weight, _, adapter = head
        width = weight.shape[1]
        if self.of.hidden is not None:
            self.of.hidden[rows, :width] = of_logits @ weight
            if adapter is not None:
                self.of.hidden[rows, width:] = of_logits @ adapter
        if self.weight is not None:
            self._add_product(self.weight, of_logits.T, hidden[:, :width])
        if self.adapter is not None:
            self._add_product(self.adapter, of_logits.T, hidden[:, width:])

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
        """Round the sums to the dtype of the gradients."""
        totals = (self.weight, self.bias, self.adapter)
        for result, total in zip(self.of[1:], totals, strict=True):
            if result is not None and total is not None and total is not result:
                result.copy_(total)


def _sum_of(result: Tensor | None, wide: torch.dtype | None) -> Tensor | None:
    """Return zeros to add to: the result itself, where its dtype is wide or need not be."""
    if result is None:
        return None
    is_enough = wide is None or result.dtype is wide
    return result.zero_() if is_enough else torch.zeros_like(result, dtype=wide)


@torch.library.custom_op("thunder_memsave::add_wide_product", mutates_args=("total",))
def add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` on CUDA, where cuBLAS adds it up in the total's dtype and makes nothing beside.

    Args:
        total: float32 (m, n).
        left: bfloat16 or float16 (m, k).
        right: Of the same dtype, (k, n).
    """
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


@add_wide_product.register_fake
def _(total: Tensor, left: Tensor, right: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.thunder_memsave.add_wide_product)
def _flops_of_product(
    total: Sequence[int], left: Sequence[int], right: Sequence[int], out_shape: Any = None
) -> int:
    return 2 * left[0] * left[1] * right[1]


def multiplied(value: Tensor, factor: Tensor) -> Tensor:
    """Return `value * factor` in its dtype, by parts of its rows where the factor has a wider one."""
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
