"""Records the loss of a linear in fp8 as one operator of forward and one of backward, in tiles of tokens.

Before, of a head and its loss:

    (q, q_scale) = fp8_quantize_delayed_torch(weight, ...)
    (x, x_scale) = fp8_quantize_delayed_torch(hidden, ...)
    logits = fp8_gemm_torch(x, x_scale, q, q_scale, ...)
    loss = cross_entropy(logits, targets)                # and its operators in backward

After:

    (q, q_scale) = fp8_quantize_delayed_torch(weight, ...)
    (x, x_scale) = fp8_quantize_delayed_torch(hidden, ...)
    loss = linear_cross_entropy_in_fp8(x, x_scale, q, q_scale, None, targets, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import thunder.torch as ltorch
import torch
from thunder.core.proxies import TensorProxy

from thunder_memsave.fp8.compute.operators import name_of_kernels
from thunder_memsave.fp8.compute.symbols import Computation, LinearOperators, StateProxies
from thunder_memsave.ops.families.linear_cross_entropy import Reduction
from thunder_memsave.ops.families.linear_cross_entropy_in_fp8 import (
    Settings,
    backward,
    forward,
    fp8_tile_rows,
)
from thunder_memsave.ops.families.loss_sums import Wanted
from thunder_memsave.ops.kernel_calls import symbol_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """The loss of a linear, as `linear_cross_entropy` describes it."""

    reduction: Reduction
    label_smoothing: float
    soft_cap: float | None
    logit_scale: float
    dtype: torch.dtype
    """Of the linear's results."""
    wanted: Wanted
    """Which operands get a gradient."""


class LossOperators(LinearOperators):
    """The loss that `linear_cross_entropy` describes, of a linear in fp8."""

    def __init__(
        self,
        computation: Computation,
        settings: LossSettings,
        operands: Sequence[TensorProxy | None],
        state: StateProxies,
    ) -> None:
        """Record nothing yet.

        Args:
            computation: The settings of the linear.
            settings: Those of the loss.
            operands: Hidden states (tokens, in) in the compute dtype; weight (out, in); bias (out,) or None; targets
                (tokens,), int64, of which -100 has no loss; how many of them have one, an int64 scalar on the CPU, or
                None.
            state: The linear's state.
        """
        x, weight, bias, self._targets, self._num_kept = operands
        assert x is not None
        assert weight is not None
        super().__init__(computation, x, weight, bias, state)
        assert self._scaling != "nvfp4", "LinearNodes.has_tiled_losses says so"
        self._wanted = settings.wanted
        self._settings = Settings(
            reduction=settings.reduction,
            label_smoothing=settings.label_smoothing,
            z_loss=0.0,
            soft_cap=settings.soft_cap,
            logit_scale=settings.logit_scale,
            dtype=settings.dtype,
            use_fast_accum=self._recipe.use_fast_accum("forward"),
            kernels=name_of_kernels(computation.backend),
        )
        sizes = (x.shape[0], weight.shape[0])
        width = weight.shape[1] if self._wanted.weight else 0
        self._rows_per_tile = fp8_tile_rows(
            *sizes, self._settings, scaling=self._scaling, width=width
        )

    def forward(self) -> TensorProxy:
        """Record the loss, float32: a scalar, or (tokens,)."""
        self._quantized = self._quantized_weight(), self._quantize(self._x, "input")
        loss: TensorProxy = symbol_of(forward)(*self._of_logits(), *self._of_loss())
        return loss

    def gradients(
        self, grad: TensorProxy
    ) -> tuple[TensorProxy | None, TensorProxy | None, TensorProxy | None]:
        """Record the gradients of hidden states, weight and bias; those that nobody wants are None."""
        wanted = self._wanted
        found = symbol_of(backward)(
            *(grad, *self._of_logits(), *self._of_cast()),
            *(self._scaling, self._recipe.dtype("grad"), self._records, tuple(wanted[:3])),
            *self._of_loss(),
        )
        made = iter(found if isinstance(found, tuple) else (found,))
        operands = (self._x, self._weight, self._bias)
        of_hidden, of_weight, of_bias = (
            ltorch.to(next(made), operand.dtype) if is_wanted and operand is not None else None
            for operand, is_wanted in zip(operands, wanted, strict=False)
        )
        return of_hidden, of_weight, of_bias

    def _of_logits(self) -> tuple[TensorProxy | None, ...]:
        assert self._quantized is not None, "forward comes first"
        weight, x = self._quantized
        bias = None if self._bias is None else ltorch.to(self._bias, self._x.dtype)
        return x.data, x.scale_inv, weight.data, weight.scale_inv, bias

    def _of_loss(self) -> tuple[object, ...]:
        return self._targets, self._num_kept, *self._settings, self._rows_per_tile

    def _of_cast(self) -> tuple[TensorProxy | None, ...]:
        """Return the hidden states before their cast, the transposed weight, and the scale of gradients of logits."""
        assert self._quantized is not None, "forward comes first"
        weight, _ = self._quantized
        whole = self._x if self._scaling != "tensor" and self._wanted.weight else None
        transposed = self._transposed_weight(weight) if self._wanted.hidden else None
        data, scale_inv = (
            (None, None) if transposed is None else (transposed.data, transposed.scale_inv)
        )
        is_delayed = self._recipe.name == "delayed"
        state = self._state
        scale = state.backward_scale if is_delayed else None
        return whole, data, scale_inv, scale, state.backward_amax_history if is_delayed else None
