"""Cross-entropy of a linear layer's results in tiles of tokens: the logits never exist whole, nor do their gradients.

The losses, and with `wanted` their gradients by hidden states, weight and bias for a cotangent of one, come from one
pass: each tile has its logits once. All after the products is computed in float32, in float64 for float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from thunder_memsave.aten.record import turns_of
from thunder_memsave.ops.families.loss_sums import Gradients, Sums, Wanted, WideSums, wide_dtype
from thunder_memsave.ops.launches import losses as launches

IGNORED = -100
"""The target of tokens that have no loss."""
TILE_BYTES = 192 * 2**20
"""Bytes that the logits of a tile may take, with their copies; more beside the sum of a large weight's gradients."""


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
    in_one_launch: bool = False,
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
        in_one_launch: Whether logits have no copies: tiles are `LaunchedTile`s.
        more_bytes: What each logit takes beside those copies, in a wide dtype and in `dtype`.
        width: Of the weight, if it gets a gradient.
    """
    wide = wide_dtype(dtype).itemsize
    of_logit = dtype.itemsize + more_bytes
    if not in_one_launch:
        of_logit += wide * (options.soft_cap is not None) + wide * (dtype.itemsize != wide)
    tile_bytes = max(TILE_BYTES, wide * num_classes * width // 2)
    most = max(1, tile_bytes // (num_classes * of_logit))
    num_tiles = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_tiles))


def losses_in_tiles(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    options: LossOptions,
    *,
    num_kept: Tensor | None = None,
    rows_per_tile: int,
    is_on_cuda: bool = False,
    in_one_launch: bool = False,
    factors: Tensor | None = None,
    wanted: Wanted | None = None,
    make_gradients: Callable[[], Gradients] | None = None,
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
        in_one_launch: Whether Triton makes losses of a tile's logits, and their gradients.
        factors: What each token's loss is multiplied by before it is differentiated, as a number or (tokens,).
        wanted: The operands that get a gradient; None: none does.
        make_gradients: Makes the tensors that are written: before the tiles, or after the last, beside none, where the
            sums of a wide dtype are rounded to them.
    """
    wide = wide_dtype(hidden.dtype)
    losses = torch.zeros(targets.shape, dtype=wide, device=hidden.device)
    places = kept_places(targets, num_kept)
    sums = None
    if wanted is not None and make_gradients is not None:
        is_rounded = hidden.dtype is not wide and any(wanted[1:])
        if num_computed(targets, places) <= rows_per_tile:  # one tile: nothing is added up
            is_rounded = False
        make = WideSums if is_rounded else Sums
        sums = make(hidden, head, wanted, make_gradients, is_on_cuda=is_on_cuda)
    make_tile = LaunchedTile if in_one_launch else Tile
    for rows in tiles_of(targets, places, rows_per_tile):
        of_rows = hidden[rows]
        tile = make_tile(head.logits(of_rows), targets[rows], options)
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

    values: Tensor
    """(tokens, classes): after `of_logits`, the gradients, in the dtype in which they are added up for a bias."""

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
        # A logit and its probability tell the denominator: those of the largest are always finite.
        largest = values.argmax(1, keepdim=True) if options.z_loss else None
        of_largest = None if largest is None else values.gather(1, largest)
        torch.ops.aten._log_softmax.out(values, -1, False, out=values)
        losses = -values.gather(1, self.targets).squeeze(1)
        if options.label_smoothing:
            losses.mul_(1.0 - options.label_smoothing)
            losses.sub_(values.sum(1), alpha=options.label_smoothing / values.shape[1])
        if largest is not None and of_largest is not None:
            self.logarithm = (of_largest - values.gather(1, largest)).squeeze(1)
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


class LaunchedTile:
    """A `Tile` of 16-bit logits on CUDA by two launches of Triton: no copies, gradients take the logits' place."""

    def __init__(self, logits: Tensor, targets: Tensor, options: LossOptions) -> None:
        """Take the logits, which are overwritten: (tokens, classes)."""
        self.options, self.values = options, logits
        self.targets, self.is_kept = targets.contiguous(), targets != IGNORED
        self._terms: launches.Terms | None = None

    def losses(self) -> Tensor:
        """Return the tokens' losses, and leave the logits."""
        options, logits = self.options, self.values
        terms = self._terms = launches.terms_of(
            logits,
            scale=options.logit_scale,
            soft_cap=options.soft_cap,
            adds=bool(options.label_smoothing),
        )
        targets = self.targets.where(self.is_kept, 0).unsqueeze(1)
        of_target = self._capped(logits.gather(1, targets).squeeze(1).float())
        losses = terms.logarithm - of_target.sub_(terms.largest)
        if terms.total is not None:
            of_all = terms.logarithm + terms.largest - terms.total / logits.shape[1]
            losses.mul_(1.0 - options.label_smoothing).add_(of_all, alpha=options.label_smoothing)
        if options.z_loss:
            losses.add_((terms.logarithm + terms.largest).square_(), alpha=options.z_loss)
        return losses.masked_fill_(~self.is_kept, 0.0)

    def _capped(self, logits: Tensor) -> Tensor:
        options = self.options
        logits = logits.mul_(options.logit_scale)
        if options.soft_cap is not None:
            logits.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        return logits

    def of_logits(self, factors: Tensor) -> Tensor:
        """Return the gradients of the linear layer's results, in its dtype; they are left in place of all else."""
        assert self._terms is not None, "losses come first"
        launches.write_gradients(
            *(self.values, self.targets, factors, self._terms),
            ignored=IGNORED,
            scale=self.options.logit_scale,
            soft_cap=self.options.soft_cap,
            label_smoothing=self.options.label_smoothing,
            z_loss=self.options.z_loss,
        )
        return self.values
