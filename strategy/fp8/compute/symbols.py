"""A linear in fp8, and its gradients, as operators of a trace.

The gradients of the input, the weight and the bias are separate operators, so dead-code elimination removes unused
ones, and the tensors saved for them. The recorded amax is a running maximum, so recomputing an operator in backward
changes nothing.

Gradients in NVFP4 are rounded by random bits of a seed that forward draws: whatever is recomputed, and in a second
backward, they are the same. Forward's product takes the seed too and does not read it, because what only backward reads
would be drawn there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy

from thunder_memsave.config import ConfigError
from thunder_memsave.fp8.compute.operators import BLOCK, Backend, drawn_seed, operators
from thunder_memsave.fp8.kernels.nvfp4_blocks import NVFP4_BLOCK
from thunder_memsave.fp8.recipe import Product, Recipe, Role
from thunder_memsave.fp8.scaling import GRAD, INPUT, WEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class Computation:
    """The settings by which a linear computes."""

    backend: Backend
    recipe: Recipe
    records: bool
    """Whether amax is recorded, as it is in training."""
    is_frozen: bool
    """Whether the weight is frozen; it is then scaled by its own amax."""
    has_backward: bool
    """Whether gradients are recorded too."""


@dataclass(frozen=True, slots=True)
class StateProxies:
    """The state that a linear reads beside its input and parameters; None: it has no such part."""

    forward_scale: TensorProxy | None = None
    forward_amax_history: TensorProxy | None = None
    backward_scale: TensorProxy | None = None
    backward_amax_history: TensorProxy | None = None
    weight: TensorProxy | None = None
    """A frozen weight's fp8 numbers, kept beside or instead of the weight; the next three belong to them."""
    weight_transposed: TensorProxy | None = None
    weight_scale_inv: TensorProxy | None = None
    weight_transposed_scale_inv: TensorProxy | None = None
    """Of a transpose that was cast by itself; None: it has the scales of the weight."""
    weight_amax: TensorProxy | None = None
    """Of a weight in NVFP4 and of its transpose."""


def dequantized(numbers: TensorProxy, scale_inv: TensorProxy, dtype: dtypes.dtype) -> TensorProxy:
    """Record the dequantisation of a weight.

    Args:
        numbers: fp8, shape [out, in].
        scale_inv: Inverse scales: shape [1], or one for each block of 128x128.
        dtype: The result's dtype.
    """
    factors = scale_inv
    if len(scale_inv.shape) == 2:
        down, across = scale_inv.shape
        blocks = ltorch.reshape(scale_inv, (down, 1, across, 1)).expand(down, BLOCK, across, BLOCK)
        factors = ltorch.reshape(blocks, (down * BLOCK, across * BLOCK))
        factors = factors[: numbers.shape[0], : numbers.shape[1]]
    return ltorch.to(ltorch.to(numbers, dtypes.float32) * factors, dtype)


@dataclass(frozen=True, slots=True)
class _Quantized:
    data: TensorProxy
    scale_inv: TensorProxy
    amax: TensorProxy | None = None
    """Of the tensor, in NVFP4."""


class LinearOperators:
    """`x @ weight.t() + bias` in fp8, recorded as operators of a backend: forward, and after it the gradients."""

    def __init__(
        self,
        computation: Computation,
        x: TensorProxy,
        weight: TensorProxy,
        bias: TensorProxy | None,
        state: StateProxies,
    ) -> None:
        """Record nothing yet.

        Args:
            computation: The settings.
            x: Shape [..., in], in the compute dtype.
            weight: Shape [out, in]; not read if `state` has it in fp8.
            bias: Shape [out].
            state: The linear's state.

        Raises:
            ConfigError: The recipe does not compute in this dtype.
        """
        self._recipe, self._records = computation.recipe, computation.records
        self._is_frozen, self._scaling = computation.is_frozen, computation.recipe.scaling
        self._operators = operators(computation.backend)
        self._x, self._weight, self._bias, self._state = x, weight, bias, state
        self._dtype = dtypes.to_torch_dtype(x.dtype)
        self._quantized: tuple[_Quantized, _Quantized] | None = None
        self._has_weight_gradient = computation.has_backward and not computation.is_frozen
        self._columns_of_x: _Quantized | None = None
        self._has_backward = computation.has_backward
        self._seed: TensorProxy | None = None
        _refuse_other_dtypes(computation.recipe, self._dtype)

    def forward(self) -> TensorProxy:
        """Record the result: shape [..., out], in the dtype of `x`."""
        if self._scaling == "nvfp4" and self._has_backward:
            self._seed = drawn_seed()
        weight = self._quantized_weight()
        if self._recipe.casts_each_direction and self._has_weight_gradient:
            # Also by columns: backward then needs these 8 or 4 bits of an element rather than the input.
            x, self._columns_of_x = self._quantized_both(self._rows(self._x))
        else:
            x = self._quantize(self._rows(self._x), "input")
        self._quantized = weight, x
        bias = None if self._bias is None else ltorch.to(self._bias, self._x.dtype)
        return self._like_input(self._gemm("forward", x, weight, bias))

    def gradients(
        self, grad: TensorProxy
    ) -> tuple[TensorProxy | None, TensorProxy | None, TensorProxy | None]:
        """Record the gradients of the input, the weight and the bias; a weight that is kept in fp8 has none."""
        assert self._quantized is not None, "forward comes first"
        weight, x = self._quantized
        grad = self._rows(grad)
        by_rows = self._quantize(grad, "grad")
        of_weight = of_bias = None
        of_input = self._grad_input(by_rows, weight)
        if self._state.weight is None:
            of_weight = ltorch.to(self._grad_weight(grad, by_rows, x), self._weight.dtype)
        if self._bias is not None:
            of_bias = ltorch.to(ltorch.sum(grad, 0), self._bias.dtype)
        return of_input, of_weight, of_bias

    def _grad_input(self, grad: _Quantized, weight: _Quantized) -> TensorProxy:
        return self._like_input(self._gemm("grad_input", grad, self._transposed_weight(weight)))

    def _transposed_weight(self, weight: _Quantized) -> _Quantized:
        transposed = self._state.weight_transposed
        if self._recipe.casts_each_direction:
            scale_inv = self._state.weight_transposed_scale_inv
            if transposed is None or scale_inv is None:
                return self._quantize_columns(self._weight, "weight")
            return _Quantized(transposed, scale_inv, self._state.weight_amax)
        if transposed is None:
            transposed = self._operators.transpose(weight.data)
        return _Quantized(transposed, self._scale_of_transposed(weight.scale_inv))

    def _grad_weight(self, grad: TensorProxy, by_rows: _Quantized, x: _Quantized) -> TensorProxy:
        if self._recipe.casts_each_direction:
            columns_of_x = self._columns_of_x or self._quantize_columns(
                self._rows(self._x), "input"
            )
            return self._gemm("grad_weight", self._quantize_columns(grad, "grad"), columns_of_x)
        if self._scaling == "block":  # row-wise blocks do not give column-wise ones
            columns = [ltorch.transpose(t, 0, 1).contiguous() for t in (grad, self._rows(self._x))]
            return self._gemm(
                "grad_weight",
                self._quantize(columns[0], "grad"),
                self._quantize(columns[1], "input"),
            )
        columns_of = self._operators.transpose
        return self._gemm(
            "grad_weight",
            _Quantized(columns_of(by_rows.data), by_rows.scale_inv),
            _Quantized(columns_of(x.data), x.scale_inv),
        )

    def _gemm(
        self, which: Product, a: _Quantized, b: _Quantized, bias: TensorProxy | None = None
    ) -> TensorProxy:
        fast = self._recipe.use_fast_accum(which)
        if self._scaling == "nvfp4":
            operands = (a.data, a.scale_inv, a.amax, b.data, b.scale_inv, b.amax)
            drawn = self._seed if which == "forward" else None
            return self._operators.gemm_nvfp4(*operands, bias, self._dtype, fast, drawn)
        return self._operators.gemm(
            a.data, a.scale_inv, b.data, b.scale_inv, bias, self._dtype, fast
        )

    def _quantized_weight(self) -> _Quantized:
        state = self._state
        if state.weight is not None:
            assert state.weight_scale_inv is not None
            return _Quantized(state.weight, state.weight_scale_inv, state.weight_amax)
        return self._quantize(self._weight, "weight")

    def _quantize(self, value: TensorProxy, role: Role) -> _Quantized:
        operators, dtype = self._operators, self._recipe.dtype(role)
        if self._scaling == "nvfp4":
            return _Quantized(*operators.quantize_nvfp4(value, *self._rounding(role)))
        if self._scaling == "mx":
            return _Quantized(*operators.quantize_mx(value, dtype))
        if self._scaling == "block":
            rows = BLOCK if role == "weight" else 1
            return _Quantized(*operators.quantize_block(value, dtype, rows, BLOCK))
        if self._recipe.name == "current" or (role == "weight" and self._is_frozen):
            return _Quantized(*operators.quantize_current(value, dtype))
        state = self._state
        scale, history = state.forward_scale, state.forward_amax_history
        if role == "grad":
            scale, history = state.backward_scale, state.backward_amax_history
        column = {"input": INPUT, "weight": WEIGHT, "grad": GRAD}[role]
        return _Quantized(
            *operators.quantize_delayed(value, scale, history, column, dtype, self._records)
        )

    def _quantize_columns(self, value: TensorProxy, role: Role) -> _Quantized:
        if self._scaling == "nvfp4":
            made = self._operators.quantize_nvfp4_columns(value, *self._rounding(role))
        else:
            made = self._operators.quantize_mx_columns(value, self._recipe.dtype(role))
        return _Quantized(*made)

    def _quantized_both(self, value: TensorProxy) -> tuple[_Quantized, _Quantized]:
        """Cast an input in both directions."""
        if self._scaling == "nvfp4":
            made = self._operators.quantize_nvfp4_both(value)
        else:
            made = self._operators.quantize_mx_both(value, self._recipe.dtype("input"))
        half = len(made) // 2
        return _Quantized(*made[:half]), _Quantized(*made[half:])

    def _rounding(self, role: Role) -> tuple[int, TensorProxy | None]:
        """Return the rows of a block in NVFP4, and the seed by which it is rounded."""
        return NVFP4_BLOCK if role == "weight" else 1, self._seed if role == "grad" else None

    def _rows(self, value: TensorProxy) -> TensorProxy:
        """Reshape to a contiguous matrix of rows."""
        rows = math.prod(value.shape[:-1])
        return ltorch.reshape(value, (rows, value.shape[-1]))

    def _like_input(self, rows: TensorProxy) -> TensorProxy:
        """Reshape a product to the input's shape, except for the last dim."""
        return ltorch.reshape(rows, (*self._x.shape[:-1], rows.shape[-1]))

    def _scale_of_transposed(self, scale_inv: TensorProxy) -> TensorProxy:
        if self._scaling != "block":
            return scale_inv
        return ltorch.transpose(scale_inv, 0, 1).contiguous()


def _refuse_other_dtypes(recipe: Recipe, dtype: torch.dtype) -> None:
    """Refuse NVFP4 in other dtypes than bfloat16, as TransformerEngine's quantiser does."""
    if recipe.scaling != "nvfp4" or dtype == torch.bfloat16:
        return
    name = str(dtype).removeprefix("torch.")
    raise ConfigError(
        "fp8.recipe is nvfp4, whose random Hadamard transform takes bfloat16 alone, and a linear layer in fp8 computes "
        f"in {name}: set `model.dtype` of a run file to bfloat16, or Fabric's `precision` to bf16-true or bf16-mixed, "
        "or `fp8.recipe` to mxfp8.",
        key="fp8.recipe",
    )
