"""Thunder's operators for a linear in fp8, and their gradients.

Each operator is one function of a backend (`torch_backend.py`, `te_backend.py`). The gradients of the input, the weight
and the bias are separate operators, so dead-code elimination removes unused ones, and the tensors saved for them. The
recorded amax is a running maximum, so recomputing an operator in backward changes nothing.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import thunder.torch as ltorch
import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.fp8.kernels.mx_blocks import MX_BLOCK, whole_blocks
from thunder_memsave.fp8.recipe import Product, Recipe, Role
from thunder_memsave.fp8.scaling import GRAD, INPUT, WEIGHT

Backend = Literal["torch", "transformer_engine"]

BLOCK = 128
"""Side of a block of weights, and length of a block of inputs and gradients, in elements."""

_MODULES = {"torch": "torch_backend", "transformer_engine": "te_backend"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operators:
    """The operators of one backend."""

    quantize_delayed: Symbol
    quantize_current: Symbol
    quantize_block: Symbol
    quantize_mx: Symbol
    quantize_mx_columns: Symbol
    quantize_mx_both: Symbol
    transpose: Symbol
    gemm: Symbol
    weight_amax: Symbol
    """Of rows, for `quantize_with_amax`; both take the place of `quantize_current` where ranks cast their own rows."""
    quantize_with_amax: Symbol


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


@cache
def operators(backend: Backend) -> Operators:
    """Return the operators of `backend`, which is imported when the first of them runs."""
    executor = OperatorExecutor(f"thunder_memsave_fp8_{backend}", version="0")
    register_executor(executor)

    def operator(name: str, meta: Callable[..., Any]) -> Symbol:
        def run(*arguments: Any) -> Any:
            # `data` has its own version counter; else autograd would refuse the backward of an earlier micro-batch.
            plain = [a.data if isinstance(a, Tensor) else a for a in arguments]
            return getattr(_backend(backend), name)(*plain)

        return executor.register_operator(f"fp8_{name}_{backend}", meta=meta, fn=run)

    return Operators(
        quantize_delayed=operator("quantize_delayed", _per_tensor),
        quantize_current=operator("quantize_current", _per_tensor),
        quantize_block=operator("quantize_block", _per_block),
        quantize_mx=operator("quantize_mx", _by_rows),
        quantize_mx_columns=operator("quantize_mx_columns", _by_columns),
        quantize_mx_both=operator("quantize_mx_both", _by_both),
        transpose=operator("transpose", _transposed),
        gemm=operator("gemm", _product),
        weight_amax=operator("weight_amax", _number),
        quantize_with_amax=operator("quantize_with_amax", _per_tensor),
    )


def quantize_frozen(backend: Backend, recipe: Recipe, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a frozen weight by its own amax.

    Apart from the margin, `delayed` arrives at the same scale after its first update.

    Args:
        backend: The backend that will compute with it.
        recipe: The recipe to quantise for.
        weight: Shape [out, in].

    Returns:
        The weight in fp8, and its inverse scale.
    """
    dtype = recipe.dtype("weight")
    kernels = _backend(backend)
    if recipe.scaling == "mx":
        return kernels.quantize_mx(weight, dtype)  # type: ignore[no-any-return]
    if recipe.scaling == "block":
        return kernels.quantize_block(weight, dtype, BLOCK, BLOCK)  # type: ignore[no-any-return]
    return kernels.quantize_current(weight, dtype)  # type: ignore[no-any-return]


def transpose_frozen(
    backend: Backend, recipe: Recipe, weight: Tensor, quantized: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the transpose of a quantised frozen weight, and its inverse scales if it has scales of its own.

    Args:
        backend: The backend that will compute with it.
        recipe: The recipe it was quantised for.
        weight: Shape [out, in].
        quantized: The weight in fp8.
    """
    kernels = _backend(backend)
    if recipe.scaling == "mx":
        return kernels.quantize_mx_columns(weight, recipe.dtype("weight"))  # type: ignore[no-any-return]
    return kernels.transpose(quantized), None


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
        """
        self._recipe, self._records = computation.recipe, computation.records
        self._is_frozen, self._scaling = computation.is_frozen, computation.recipe.scaling
        self._operators = operators(computation.backend)
        self._x, self._weight, self._bias, self._state = x, weight, bias, state
        self._dtype = dtypes.to_torch_dtype(x.dtype)
        self._quantized: tuple[_Quantized, _Quantized] | None = None
        self._has_weight_gradient = computation.has_backward and not computation.is_frozen
        self._columns_of_x: _Quantized | None = None

    def forward(self) -> TensorProxy:
        """Record the result: shape [..., out], in the dtype of `x`."""
        weight = self._quantized_weight()
        if self._scaling == "mx" and self._has_weight_gradient:
            # Also by columns: backward then needs these 8 bits of an element rather than the input.
            made = self._operators.quantize_mx_both(
                self._rows(self._x), self._recipe.dtype("input")
            )
            x, self._columns_of_x = _Quantized(*made[:2]), _Quantized(*made[2:])
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
        if self._scaling == "mx":
            scale_inv = self._state.weight_transposed_scale_inv
            if transposed is None or scale_inv is None:
                return self._quantize_columns(self._weight, "weight")
            return _Quantized(transposed, scale_inv)
        if transposed is None:
            transposed = self._operators.transpose(weight.data)
        return _Quantized(transposed, self._scale_of_transposed(weight.scale_inv))

    def _grad_weight(self, grad: TensorProxy, by_rows: _Quantized, x: _Quantized) -> TensorProxy:
        if self._scaling == "mx":
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
        return self._operators.gemm(
            a.data, a.scale_inv, b.data, b.scale_inv, bias, self._dtype, fast
        )

    def _quantized_weight(self) -> _Quantized:
        state = self._state
        if state.weight is not None:
            assert state.weight_scale_inv is not None
            return _Quantized(state.weight, state.weight_scale_inv)
        return self._quantize(self._weight, "weight")

    def _quantize(self, value: TensorProxy, role: Role) -> _Quantized:
        operators, dtype = self._operators, self._recipe.dtype(role)
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
        return _Quantized(*self._operators.quantize_mx_columns(value, self._recipe.dtype(role)))

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


def name_of_kernels(backend: Backend) -> str:
    """Return the name of the module with the functions of a backend."""
    return f"thunder_memsave.fp8.kernels.{_MODULES[backend]}"


def _backend(name: Backend) -> ModuleType:
    return importlib.import_module(name_of_kernels(name))


def _per_tensor(x: TensorProxy, *arguments: Any) -> tuple[TensorProxy, TensorProxy]:
    dtype = next(a for a in arguments if isinstance(a, torch.dtype))
    return TensorProxy(like=x, dtype=dtypes.to_dtype(dtype)), _number(x)


def _number(x: TensorProxy) -> TensorProxy:
    return TensorProxy(shape=(1,), device=x.device, dtype=dtypes.float32)


def _per_block(
    x: TensorProxy, dtype: torch.dtype, block_rows: int, block_cols: int
) -> tuple[TensorProxy, TensorProxy]:
    blocks = (-(-x.shape[0] // block_rows), -(-x.shape[1] // block_cols))
    scale_inv = TensorProxy(shape=blocks, device=x.device, dtype=dtypes.float32)
    return TensorProxy(like=x, dtype=dtypes.to_dtype(dtype)), scale_inv


def _by_rows(x: TensorProxy, dtype: torch.dtype) -> tuple[TensorProxy, TensorProxy]:
    return _in_mx(x, x.shape, dtype)


def _by_columns(x: TensorProxy, dtype: torch.dtype) -> tuple[TensorProxy, TensorProxy]:
    return _in_mx(x, (x.shape[1], whole_blocks(x.shape[0])), dtype)


def _by_both(x: TensorProxy, dtype: torch.dtype) -> tuple[TensorProxy, ...]:
    return *_by_rows(x, dtype), *_by_columns(x, dtype)


def _in_mx(
    x: TensorProxy, shape: Sequence[int], dtype: torch.dtype
) -> tuple[TensorProxy, TensorProxy]:
    blocks = (shape[0], shape[1] // MX_BLOCK)
    scale_inv = TensorProxy(shape=blocks, device=x.device, dtype=dtypes.uint8)
    return TensorProxy(like=x, shape=tuple(shape), dtype=dtypes.to_dtype(dtype)), scale_inv


def _transposed(q: TensorProxy) -> TensorProxy:
    return TensorProxy(like=q, shape=(q.shape[1], q.shape[0]))


def _product(
    a: TensorProxy,
    a_scale_inv: TensorProxy,
    b: TensorProxy,
    b_scale_inv: TensorProxy,
    bias: TensorProxy | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> TensorProxy:
    return TensorProxy(like=a, shape=(a.shape[0], b.shape[0]), dtype=dtypes.to_dtype(out_dtype))
