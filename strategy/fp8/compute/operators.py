"""Thunder's operators of fp8, each of them one function of a backend: `torch_backend.py` or `te_backend.py`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import get_tracectx
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.fp8.kernels.mx_blocks import MX_BLOCK, whole_blocks
from thunder_memsave.fp8.kernels.nvfp4_blocks import NVFP4_BLOCK
from thunder_memsave.fp8.recipe import Recipe

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
    quantize_nvfp4: Symbol
    quantize_nvfp4_columns: Symbol
    quantize_nvfp4_both: Symbol
    transpose: Symbol
    gemm: Symbol
    gemm_nvfp4: Symbol
    weight_amax: Symbol
    """Of rows, for `quantize_with_amax`; both take the place of `quantize_current` where ranks cast their own rows."""
    quantize_with_amax: Symbol


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
        quantize_nvfp4=operator("quantize_nvfp4", _nvfp4_by_rows),
        quantize_nvfp4_columns=operator("quantize_nvfp4_columns", _nvfp4_by_columns),
        quantize_nvfp4_both=operator("quantize_nvfp4_both", _nvfp4_by_both),
        transpose=operator("transpose", _transposed),
        gemm=operator("gemm", _product),
        gemm_nvfp4=operator("gemm_nvfp4", _product_in_nvfp4),
        weight_amax=operator("weight_amax", _number),
        quantize_with_amax=operator("quantize_with_amax", _per_tensor),
    )


def drawn_seed() -> TensorProxy:
    """Record the draw of a seed from the CPU's generator, as a random operation that is replayed, never redrawn."""
    found: TensorProxy = _seed_operator()()
    get_tracectx().peek_scope()[-1].tags.add(OpTags.RANDOM_OP)
    return found


@cache
def _seed_operator() -> Symbol:
    executor = OperatorExecutor("thunder_memsave_fp8_seed", version="0")
    register_executor(executor)
    return executor.register_operator("fp8_seed", meta=_seed, fn=_draw)


def _draw() -> Tensor:
    return torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")


def quantize_frozen(backend: Backend, recipe: Recipe, weight: Tensor) -> tuple[Tensor, ...]:
    """Quantise a frozen weight by its own amax.

    Apart from the margin, `delayed` arrives at the same scale after its first update.

    Args:
        backend: The backend that will compute with it.
        recipe: The recipe to quantise for.
        weight: Shape [out, in].

    Returns:
        The weight in fp8, and its inverse scale; in NVFP4, also its amax.
    """
    kernels = _backend(backend)
    if recipe.scaling == "nvfp4":
        return kernels.quantize_nvfp4(weight, NVFP4_BLOCK, None)  # type: ignore[no-any-return]
    dtype = recipe.dtype("weight")
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
    if recipe.scaling == "nvfp4":
        numbers, scale_inv, _ = kernels.quantize_nvfp4_columns(weight, NVFP4_BLOCK, None)
        return numbers, scale_inv
    if recipe.scaling == "mx":
        return kernels.quantize_mx_columns(weight, recipe.dtype("weight"))  # type: ignore[no-any-return]
    return kernels.transpose(quantized), None


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


def _seed() -> TensorProxy:
    return TensorProxy(shape=(1,), device=devices.cpu, dtype=dtypes.int64)


def _nvfp4_by_rows(x: TensorProxy, *_: Any) -> tuple[TensorProxy, ...]:
    return _in_nvfp4(x, x.shape)


def _nvfp4_by_columns(x: TensorProxy, *_: Any) -> tuple[TensorProxy, ...]:
    return _in_nvfp4(x, (x.shape[1], whole_blocks(x.shape[0])))


def _nvfp4_by_both(x: TensorProxy) -> tuple[TensorProxy, ...]:
    return *_nvfp4_by_rows(x), *_nvfp4_by_columns(x)


def _in_nvfp4(x: TensorProxy, shape: Sequence[int]) -> tuple[TensorProxy, ...]:
    rows, columns = shape
    return (
        TensorProxy(like=x, shape=(rows, columns // 2), dtype=dtypes.uint8),
        TensorProxy(like=x, shape=(rows, columns // NVFP4_BLOCK), dtype=dtypes.float8_e4m3fn),
        TensorProxy(shape=(1,), device=x.device, dtype=dtypes.float32),
    )


def _product_in_nvfp4(
    a: TensorProxy,
    _a_scales: TensorProxy,
    _a_amax: TensorProxy,
    b: TensorProxy,
    _b_scales: TensorProxy,
    _b_amax: TensorProxy,
    _bias: TensorProxy | None,
    out_dtype: torch.dtype,
    *_: Any,
) -> TensorProxy:
    shape = (a.shape[0], b.shape[0])
    return TensorProxy(like=a, shape=shape, dtype=dtypes.to_dtype(out_dtype))
