"""A linear layer and the cross-entropy of its results as one operation, whose logits never exist whole.

Forward makes the gradients too, for a cotangent of one, while it has a tile's logits; backward multiplies them. They
are one value that a plan keeps or not: where not, `without_gradients` says what forward runs instead, and backward runs
the whole kernel, so that the bits are the same. Rows of losses each with a cotangent of its own leave a trained weight
no such value: there backward computes each tile's logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_memsave.ops.cuda_device import device_of
from thunder_memsave.ops.families.loss_sums import Gradients, Wanted, multiplied, wide_dtype
from thunder_memsave.ops.families.tiled_loss import (
    IGNORED,
    Head,
    LossOptions,
    Sizes,
    gradients_in,
    losses_in_tiles,
    tile_rows,
)
from thunder_memsave.ops.kernel_calls import call_kernel
from thunder_memsave.ops.launches import losses as launches
from thunder_memsave.ops.operation import ROWS_PER_TILE, Derivative, Kernel, Operation

Reduction = Literal["mean", "sum", "none"]
Part = Literal["hidden", "weight", "bias", "adapter"]
_PARTS: tuple[Part, ...] = ("hidden", "weight", "bias", "adapter")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    adapter: Tensor | None = None,
    num_kept: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    dtype: torch.dtype | None = None,
    loss_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `cross_entropy(soft_cap * tanh(logit_scale * linear(hidden, weight, bias) / soft_cap), targets)`.

    Args:
        hidden: (tokens, width), or with an adapter (tokens, width + rank).
        weight: (classes, width).
        bias: (classes,), or None.
        targets: (tokens,), int64.
        adapter: (classes, rank): the last elements of hidden states times this are added to the linear layer's results;
            or None.
        num_kept: int64 scalar on the CPU: how many targets are not ignored, so that no others are computed on a device
            either; None: on a CPU they are counted, on a device all are computed.
        reduction: `mean` over the tokens that are not ignored, `sum`, or `none`: a loss per token. Without smoothing
            and `z_loss` that is the negative logarithm of the target's probability.
        ignore_index: Target of tokens that have no loss.
        label_smoothing: As in `torch.nn.functional.cross_entropy`.
        z_loss: Factor of the squared logarithm of the softmax's denominator.
        soft_cap: See above; None: logits are not capped.
        logit_scale: See above.
        dtype: That of the linear layer's results; None: that of `hidden`.
        loss_dtype: That of the result; None: float32, or float64 for float64.

    Returns:
        The loss: a scalar, or (tokens,).
    """
    rank = 0 if adapter is None else adapter.shape[1]
    sizes = (hidden.shape[0], weight.shape[1], weight.shape[0], rank)
    given = (hidden, weight, bias, adapter)
    operands = [None if t is None else t.to(dtype or hidden.dtype) for t in given]
    assert hidden.shape[0] == targets.shape[0], "each token has a target"
    targets = with_usual_index(targets, ignore_index)
    options = (float(label_smoothing), float(z_loss), soft_cap, float(logit_scale))
    wanted = _wanted(operands)
    in_one_launch = launches.applies(hidden, dtype or hidden.dtype)
    rows = tile_rows(
        *(sizes[0], sizes[2], dtype or hidden.dtype, LossOptions(*options)),
        in_one_launch=in_one_launch,
        width=sizes[1] if wanted.weight else 0,
    )
    is_on_cuda = device_of(hidden).type == "cuda"
    settings = (*sizes, reduction, *options, rows, is_on_cuda, in_one_launch)
    loss = call_kernel(_kernel_for(wanted, reduction), *operands, targets, num_kept, *settings)
    return loss if loss_dtype is None else loss.to(loss_dtype)


def with_usual_index(targets: Tensor, ignore_index: int) -> Tensor:
    """Return the targets with `IGNORED` for `ignore_index` alone."""
    if ignore_index == IGNORED:
        return targets
    others = targets.masked_fill(targets == IGNORED, IGNORED - 1)  # no class either
    return torch.where(targets == ignore_index, IGNORED, others)


def _wanted(operands: Sequence[Tensor | None]) -> Wanted:
    is_enabled = torch.is_grad_enabled()
    return Wanted(*(is_enabled and t is not None and t.requires_grad for t in operands))


_TAKES = (
    *("hidden", "weight", "bias", "adapter", "targets", "num_kept"),
    *("num_tokens", "width", "num_classes", "rank", "reduction"),
    *("label_smoothing", "z_loss", "soft_cap", "logit_scale", ROWS_PER_TILE),
    *("is_on_cuda", "in_one_launch"),
)

_ON_HOST = ("num_kept",)


def _losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: Tensor | None,
    targets: Tensor,
    num_kept: Tensor | None,
    *settings: Any,
    factors: Tensor | None = None,
    wanted: Wanted | None = None,
    make_gradients: Callable[[], Gradients] | None = None,
) -> Tensor:
    *options, rows, is_on_cuda, in_one_launch = settings[5:]
    return losses_in_tiles(
        *(hidden, Head(weight, bias, adapter), targets, LossOptions(*options)),
        num_kept=num_kept,
        rows_per_tile=rows,
        is_on_cuda=is_on_cuda,
        in_one_launch=in_one_launch,
        factors=factors,
        wanted=wanted,
        make_gradients=make_gradients,
    )


def _loss(*operands: Any) -> Tensor:
    targets, reduction = operands[4], operands[10]
    refuse_unknown(targets, operands[1].shape[0])
    return reduced(_losses(*operands), targets, reduction)


def reduced(losses: Tensor, targets: Tensor, reduction: Reduction) -> Tensor:
    """Return what the reduction makes of the losses of tokens, which are 0 where a target is ignored."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / num_kept_of(targets, losses.dtype)


def num_kept_of(targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how many targets are not ignored, as a number of this dtype."""
    return (targets != IGNORED).sum().to(dtype)


def refuse_unknown(targets: Tensor, num_classes: int) -> None:
    """Refuse targets that are no class, as PyTorch does; on CUDA its kernel for `gather` does."""
    if not targets.is_cpu or type(targets) is not Tensor or not targets.numel():
        return
    is_known = ((targets >= 0) & (targets < num_classes)) | (targets == IGNORED)
    if not bool(is_known.all()):
        raise IndexError(
            f"Target {int(targets[~is_known][0])} is out of bounds: there are {num_classes} classes, 0 to "
            f"{num_classes - 1}."
        )


def _fake_loss(hidden: Tensor, *others: Any) -> Tensor:
    shape = others[3].shape if others[9] == "none" else ()
    return hidden.new_empty(shape, dtype=wide_dtype(hidden.dtype))


def _loss_meta(hidden: TensorProxy, *others: Any) -> TensorProxy:
    return TensorProxy(
        shape=others[3].shape if others[9] == "none" else (),
        device=hidden.device,
        dtype=dtypes.float64 if hidden.dtype is dtypes.float64 else dtypes.float32,
    )


def _loss_and_gradients(wanted: Wanted) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(*operands: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, _, _, targets, _, *settings = operands
        refuse_unknown(targets, weight.shape[0])
        sizes, reduction = Sizes(*settings[:4]), settings[4]
        made: list[Tensor] = []

        def make() -> Gradients:
            made.append(hidden.new_empty(sizes.num_elements(wanted)))
            return gradients_in(made[0], sizes, wanted)

        factor = torch.ones((), dtype=wide_dtype(hidden.dtype), device=hidden.device)
        if reduction == "mean":
            factor = factor / num_kept_of(targets, factor.dtype)
        losses = _losses(*operands, factors=factor, wanted=wanted, make_gradients=make)
        return reduced(losses, targets, reduction), made[0]

    return run


def _part_of(wanted: Wanted, name: Part) -> Derivative:
    def run(grad: Tensor, gradients: Tensor, *settings: int) -> Tensor:
        *sizes, in_one_launch = settings
        value = getattr(gradients_in(gradients, Sizes(*sizes), wanted), name)
        return multiplied(value, grad, in_one_launch=bool(in_one_launch))

    def shape(sizes: Sequence[int]) -> tuple[int, ...]:
        found = Sizes(*sizes).shapes(wanted)[_PARTS.index(name)]
        assert found is not None, "it is wanted"
        return found

    return Derivative(
        name=f"{_name(wanted)}_{name}_backward",
        run=run,
        meta=lambda grad, gradients, *sizes: TensorProxy(like=gradients, shape=shape(sizes[:4])),
        fake=lambda grad, gradients, *sizes: gradients.new_empty(shape(sizes[:4])),
        of=(name,),
        reads=("gradients", "num_tokens", "width", "num_classes", "rank", "in_one_launch"),
    )


def _gradients_of_rows(wanted: Wanted) -> Derivative:
    def shapes(settings: Sequence[Any]) -> list[tuple[int, ...]]:
        return [s for s in Sizes(*settings[:4]).shapes(wanted) if s is not None]

    def run(grad: Tensor, *operands: Any) -> Any:
        made: list[Tensor] = []

        def make() -> Gradients:
            made.extend(operands[0].new_empty(shape) for shape in shapes(operands[6:]))
            remaining = iter(made)
            return Gradients(*(next(remaining) if w else None for w in wanted))

        _losses(*operands, factors=grad, wanted=wanted, make_gradients=make)
        return one_or_all(made)

    def meta(grad: TensorProxy, hidden: TensorProxy, *others: Any) -> Any:
        return one_or_all([TensorProxy(like=hidden, shape=s) for s in shapes(others[5:])])

    def fake(grad: Tensor, hidden: Tensor, *others: Any) -> Any:
        return one_or_all([hidden.new_empty(s) for s in shapes(others[5:])])

    return Derivative(
        name=f"{_name(wanted)}_of_rows_backward",
        run=run,
        meta=meta,
        fake=fake,
        of=tuple(part for part, w in zip(_PARTS, wanted, strict=True) if w),
        reads=_TAKES,
    )


def one_or_all(values: list[Any]) -> Any:
    """Return what an operator with these results returns."""
    return tuple(values) if len(values) > 1 else values[0]


def _name(wanted: Wanted) -> str:
    parts = [part for part, w in zip(_PARTS, wanted, strict=True) if w]
    return "_".join(("linear_cross_entropy", *parts))


def keep_all(tensors: Sequence[Tensor]) -> None:
    """Let all tokens have a loss."""
    targets = next(t for t in tensors if t.dtype is torch.int64 and t.ndim)
    for num_kept in tensors:
        if num_kept.dtype is torch.int64 and not num_kept.ndim:
            num_kept.fill_(targets.numel())


def _loss_kernel(name: str, derivatives: tuple[Derivative, ...] = ()) -> Kernel:
    return Kernel(
        name=name,
        takes=_TAKES,
        run=_loss,
        fake=_fake_loss,
        meta=_loss_meta,
        derivatives=derivatives,
        numbers=keep_all,
        on_host=_ON_HOST,
    )


_without_gradients = _loss_kernel("linear_cross_entropy_alone")


def _kernel_with_gradients(wanted: Wanted) -> Kernel:
    def fake(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        sizes = Sizes(*others[5:9])
        return _fake_loss(hidden, *others), hidden.new_empty(sizes.num_elements(wanted))

    def meta(hidden: TensorProxy, *others: Any) -> tuple[TensorProxy, TensorProxy]:
        length = Sizes(*others[5:9]).num_elements(wanted)
        return _loss_meta(hidden, *others), TensorProxy(like=hidden, shape=(length,))

    return Kernel(
        name=_name(wanted),
        takes=_TAKES,
        run=_loss_and_gradients(wanted),
        fake=fake,
        meta=meta,
        results=("result", "gradients"),
        derivatives=tuple(_part_of(wanted, p) for p in _PARTS if getattr(wanted, p)),
        numbers=keep_all,
        on_host=_ON_HOST,
        alone=_without_gradients,
    )


_ALL_WANTED = [Wanted(*w) for w in product((True, False), repeat=4) if any(w)]
_with_gradients = {wanted: _kernel_with_gradients(wanted) for wanted in _ALL_WANTED}
_of_rows = {
    wanted: _loss_kernel(f"{_name(wanted)}_of_rows", (_gradients_of_rows(wanted),))
    for wanted in _ALL_WANTED
    if wanted.weight or wanted.bias or wanted.adapter
}


def _kernel_for(wanted: Wanted, reduction: Reduction) -> Kernel:
    if not any(wanted):
        return _without_gradients
    if reduction == "none" and wanted in _of_rows:
        return _of_rows[wanted]
    return _with_gradients[wanted]


OPERATIONS = (
    Operation(
        name="linear_cross_entropy",
        functions=(linear_cross_entropy,),
        run=linear_cross_entropy,
        kernels=(_without_gradients, *_with_gradients.values(), *_of_rows.values()),
    ),
)
