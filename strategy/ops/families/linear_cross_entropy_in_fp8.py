"""A linear layer in fp8 and the cross-entropy of its results as one operation, whose logits never exist whole.

Gradients of logits are cast after they are multiplied by the loss's cotangent, and delayed scaling records their amax
in backward alone. So forward makes the loss and nothing else, and backward computes each tile's logits again. The casts
of hidden states and weight are operators of their own, before this one. The functions of fp8 come from a backend's
module, whose name is an argument.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_memsave.ops.families.linear_cross_entropy import (
    Reduction,
    keep_all,
    num_kept_of,
    one_or_all,
    reduced,
    refuse_unknown,
)
from thunder_memsave.ops.families.loss_sums import Wanted
from thunder_memsave.ops.families.tiled_fp8_loss import (
    BLOCK,
    Fp8Head,
    Fp8Kernels,
    Fp8LossGradients,
    GradientCast,
    Quantized,
    Scaling,
    fp8_losses_in_tiles,
)
from thunder_memsave.ops.families.tiled_loss import LossOptions, tile_rows
from thunder_memsave.ops.operation import ROWS_PER_TILE, Derivative, Kernel, Operation


class Settings(NamedTuple):
    """What the operators take beside tensors."""

    reduction: Reduction
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    logit_scale: float
    dtype: torch.dtype
    """Of the logits."""
    use_fast_accum: bool
    """Whether forward's products may accumulate in fewer bits."""
    kernels: str
    """Name of the module with the functions of the backend."""

    @property
    def options(self) -> LossOptions:
        """The terms and factors of the loss."""
        return LossOptions(self.label_smoothing, self.z_loss, self.soft_cap, self.logit_scale)


_OF_LOGITS = ("hidden", "hidden_scale_inv", "weight", "weight_scale_inv", "bias")
_OF_LOSS = ("targets", "num_kept", *Settings._fields, ROWS_PER_TILE)
_OF_CAST = ("whole_hidden", "transposed", "transposed_scale_inv", "scale", "history")
_OF_GRADIENTS = ("scaling", "grad_dtype", "records", "wanted")


def fp8_tile_rows(
    num_tokens: int, num_classes: int, settings: Settings, *, scaling: Scaling, width: int
) -> int:
    """Return the tokens of a tile; arguments are those of `tiled_loss.tile_rows`.

    A logit's gradient takes a byte in fp8 and one in its transpose; blocks are cast from a transposed copy too.
    """
    dtype = settings.dtype
    more_bytes = 2 + dtype.itemsize * (scaling == "block")
    has_blocks = scaling != "tensor"
    rows = tile_rows(
        num_tokens, num_classes, dtype, settings.options, more_bytes=more_bytes, width=width
    )
    return max(rows // BLOCK, 1) * BLOCK if has_blocks and rows < num_tokens else rows


def _head(operands: Sequence[Any], settings: Settings) -> tuple[Quantized, Fp8Head]:
    hidden, hidden_scale_inv, weight, weight_scale_inv, bias = operands
    head = Fp8Head(
        weight=Quantized(weight, weight_scale_inv),
        bias=bias,
        dtype=settings.dtype,
        use_fast_accum=settings.use_fast_accum,
        kernels=cast("Fp8Kernels", importlib.import_module(settings.kernels)),
    )
    return Quantized(hidden, hidden_scale_inv), head


def _loss(*arguments: Any) -> Tensor:
    operands, (targets, num_kept, *others, rows) = arguments[:5], arguments[5:]
    settings = Settings(*others)
    refuse_unknown(targets, operands[2].shape[0])
    hidden, head = _head(operands, settings)
    losses = fp8_losses_in_tiles(
        *(hidden, head, targets, settings.options), num_kept=num_kept, rows_per_tile=rows
    )
    return reduced(losses, targets, settings.reduction)


def _loss_meta(hidden: TensorProxy, *others: Any) -> TensorProxy:
    targets, settings = others[4], Settings(*others[6:-1])
    shape = targets.shape if settings.reduction == "none" else ()
    return TensorProxy(shape=shape, device=hidden.device, dtype=dtypes.float32)


def _gradients(grad: Tensor, *arguments: Any) -> Any:
    operands, of_cast, of_gradients = arguments[:5], arguments[5:10], arguments[10:14]
    targets, num_kept, *others, rows = arguments[14:]
    whole_hidden, transposed, transposed_scale_inv, scale, history = of_cast
    scaling, grad_dtype, records, wanted = of_gradients
    settings = Settings(*others)
    hidden, head = _head(operands, settings)
    factors = grad
    if settings.reduction == "mean":
        factors = grad / num_kept_of(targets, grad.dtype)
    # `data` has its own version counter; else autograd would refuse the backward of an earlier micro-batch.
    history = None if history is None else history.data
    found = Fp8LossGradients(
        hidden=hidden,
        whole_hidden=whole_hidden,
        head=head,
        transposed=None if transposed is None else Quantized(transposed, transposed_scale_inv),
        targets=targets,
        options=settings.options,
        factors=factors,
        cast=GradientCast(grad_dtype, scaling, scale, history, records),
        wanted=Wanted(*wanted),
    ).in_tiles(num_kept, rows)
    return one_or_all([g for g in found if g is not None])


def _gradients_meta(grad: TensorProxy, *arguments: Any) -> Any:
    hidden, weight, (*_, wanted) = arguments[0], arguments[2], arguments[10:14]
    dtype = dtypes.to_dtype(Settings(*arguments[16:-1]).dtype)
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return one_or_all(
        [
            TensorProxy(shape=shape, device=hidden.device, dtype=dtype)
            for shape, is_wanted in zip(shapes, wanted, strict=False)
            if is_wanted
        ]
    )


backward = Derivative(
    name="linear_cross_entropy_in_fp8_backward",
    run=_gradients,
    meta=_gradients_meta,
    of=("hidden", "weight", "bias"),
    reads=(*_OF_LOGITS, *_OF_CAST, *_OF_GRADIENTS, *_OF_LOSS),
)
"""`(gradient of the loss, ...) -> gradients of hidden states, weight and bias`, those that are wanted."""

forward = Kernel(
    name="linear_cross_entropy_in_fp8",
    takes=(*_OF_LOGITS, *_OF_LOSS),
    run=_loss,
    meta=_loss_meta,
    derivatives=(backward,),
    numbers=keep_all,
    on_host=("num_kept",),
)
"""`-> loss`, float32: a scalar, or (tokens,)."""

OPERATIONS = (
    Operation(name="linear_cross_entropy_in_fp8", functions=(), run=_loss, kernels=(forward,)),
)
