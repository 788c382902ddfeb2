"""RMS norm as one operator, with the bits of eager PyTorch: `torch.nn.RMSNorm`, Zhang and Sennrich 2019.

PyTorch has a kernel for it and its gradient on CUDA, for a weight of the value's dtype. Elsewhere it computes with
operators, and saves the value and one number for each row. Where it casts, backward runs them again: in bfloat16 that
takes 13 times the memory of the value, so that on a CPU its gradient is computed for a tile of rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_memsave.ops.kernel_calls import call_kernel
from thunder_memsave.ops.operation import Derivative, Kernel, Operand, Operation

_TILE_ELEMENTS = 2**21
"""Elements of values that PyTorch's operators differentiate at a time: their copies take up to 26 bytes for each."""
_FEWEST_ROWS = 1024
"""Rows of a tile at least. PyTorch divides the sum of a row between threads where it has fewer rows than threads."""


def rms_norm(
    value: Tensor, num_dims: int, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return the normalized value, in its own dtype, and the reciprocal root mean square of each row."""
    shape = value.shape[-num_dims:]
    if value.is_cpu or _has_kernel(value, weight):
        return torch.ops.aten._fused_rms_norm(value, shape, weight, eps)  # type: ignore[no-any-return]
    _, rstd = torch.ops.aten._fused_rms_norm(value, shape, None, eps)
    return torch.rms_norm(value, shape, weight, eps), rstd


def _has_kernel(value: Tensor, weight: Tensor | None) -> bool:
    return value.is_cuda and (weight is None or weight.dtype is value.dtype)


def _written_out(
    value: Tensor, num_dims: int, weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """As PyTorch's `rms_norm_composite`, whose mean is a sum and a quotient."""
    eps = torch.finfo(value.dtype).eps if eps is None else eps
    dims = tuple(reversed(range(value.ndim - num_dims, value.ndim)))
    total = (value * value).sum(dims, keepdim=True)
    rstd = torch.rsqrt(total / math.prod(value.shape[-num_dims:]) + eps)
    result = value * rstd
    return (result if weight is None else result * weight), rstd


def _meta(value: TensorProxy, num_dims: int, *_: Any) -> tuple[TensorProxy, TensorProxy]:
    rstd = TensorProxy(
        shape=(*value.shape[: value.ndim - num_dims], *(1,) * num_dims),
        device=value.device,
        dtype=value.dtype if value.dtype is dtypes.float64 else dtypes.float32,
    )
    return TensorProxy(like=value), rstd


def _of_value(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
) -> Tensor:
    if _has_kernel(value, weight):
        return _by_kernel(grad, value, num_dims, rstd, weight, [True, False])[0]
    tiles = _tiles(grad, value, num_dims)
    if len(tiles) == 1:
        return _of_rows(grad, value, num_dims, rstd, weight, eps)
    result = torch.empty_like(value)
    lead = value.ndim - num_dims
    of, given, rows, roots = (t.flatten(0, lead - 1) for t in (result, grad, value, rstd))
    for tile in tiles:
        of[tile] = _of_rows(given[tile], rows[tile], num_dims, roots[tile], weight, eps)
    return result


def _tiles(grad: Tensor, value: Tensor, num_dims: int) -> list[slice]:
    """Return the rows that are computed at a time: all on a device, and where they lie in another order.

    Each row has the bits that it has among all: no sum is over rows.
    """
    num_rows = math.prod(value.shape[:-num_dims])
    num_tiles = num_rows // max(_FEWEST_ROWS, _TILE_ELEMENTS // math.prod(value.shape[-num_dims:]))
    is_in_order = value.is_contiguous() and grad.is_contiguous()
    if num_tiles < 2 or not (value.is_cpu and is_in_order):
        return [slice(0, num_rows)]
    step = math.ceil(num_rows / num_tiles)
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _of_rows(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
) -> Tensor:
    if _is_of_one_dtype(value, weight):
        return _by_operators(grad, value, num_dims, rstd, weight)
    shape = value.shape[-num_dims:]
    return _differentiated(lambda leaf: torch.rms_norm(leaf, shape, weight, eps), value, grad)


def _of_value_written_out(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
) -> Tensor:
    """As `_by_operators`: the product with the weight is computed for each reader, and what rows share by row."""

    def weighted() -> Tensor:
        return grad if weight is None else grad * weight

    dims = tuple(range(value.ndim - num_dims, value.ndim))
    of_mean = -0.5 * (weighted() * value).sum(dims, keepdim=True) * (rstd * rstd * rstd)
    of_squares = of_mean / math.prod(value.shape[-num_dims:])
    return weighted() * rstd + of_squares * (value * 2)


def _fake_of_value(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
) -> Tensor:
    """Return a tensor laid out as the gradient, which follows that of the result: what reads it may depend on it."""
    if _has_kernel(value, weight):
        return torch.empty_like(value)
    wide = [None if t is None else t.to(rstd.dtype) for t in (grad, value, weight)]
    laid_out = _by_operators(wide[0], wide[1], num_dims, rstd, wide[2])  # type: ignore[arg-type]
    return torch.empty_strided(
        value.shape, laid_out.stride(), dtype=value.dtype, device=value.device
    )


def _of_weight(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    rstd: Tensor,
    weight: Tensor,
    eps: float | None,
) -> Tensor:
    if _has_kernel(value, weight):
        return _by_kernel(grad, value, num_dims, rstd, weight, [False, True])[1]
    shape = value.shape[-num_dims:]
    if _is_of_one_dtype(value, weight):
        return _of_weight_written_out(grad, value, num_dims, rstd)
    return _differentiated(lambda leaf: torch.rms_norm(value, shape, leaf, eps), weight, grad)


def _of_weight_written_out(
    grad: Tensor, value: Tensor, num_dims: int, rstd: Tensor, *_: Any
) -> Tensor:
    of_rows = grad * (value * rstd)
    rows = tuple(range(value.ndim - num_dims))
    return of_rows.sum(rows) if rows else of_rows


def _is_of_one_dtype(value: Tensor, weight: Tensor | None) -> bool:
    """Whether PyTorch casts nothing, so that its derivative is the one of the formula alone."""
    wide = (torch.float32, torch.float64)
    return value.dtype in wide and (weight is None or weight.dtype is value.dtype)


def _by_operators(
    grad: Tensor, value: Tensor, num_dims: int, rstd: Tensor, weight: Tensor | None
) -> Tensor:
    """Return the gradient of the value, by the operators that autograd runs, in its order, with the forward's `rstd`.

    As in PyTorch (`rms_norm_composite` in aten/src/ATen/native/layer_norm.cpp, derivatives.yaml).
    """
    dims = tuple(range(value.ndim - num_dims, value.ndim))
    grad = grad if weight is None else grad * weight
    of_mean = -0.5 * (grad * value).sum(dims, keepdim=True) * rstd.pow(3)
    of_squares = of_mean.expand_as(value) / math.prod(value.shape[-num_dims:])
    return (grad * rstd).add_(of_squares * (value * 2))


def _differentiated(run: Callable[[Tensor], Tensor], operand: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of an operand, by running the operation again."""
    leaf = operand.detach().requires_grad_()
    with torch.enable_grad():
        result = run(leaf)
    return torch.autograd.grad(result, leaf, grad)[0]


def _by_kernel(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    rstd: Tensor,
    weight: Tensor | None,
    wanted: Sequence[bool],
) -> Sequence[Tensor]:
    shape = value.shape[-num_dims:]
    run = torch.ops.aten._fused_rms_norm_backward
    return run(grad, value, shape, rstd, weight, wanted)  # type: ignore[no-any-return]


def _like_weight(
    grad: TensorProxy,
    value: TensorProxy,
    num_dims: int,
    rstd: TensorProxy,
    weight: TensorProxy,
    *_: Any,
) -> TensorProxy:
    return TensorProxy(like=weight)


def _is_cudas(operands: Sequence[Operand]) -> bool:
    """As `_has_kernel`, of operands among which is no `rstd`."""
    value, *weight = operands
    return value.device.startswith("cuda") and all(w.dtype is value.dtype for w in weight)


def _is_cudas_backward(operands: Sequence[Operand]) -> bool:
    _, value, _, *weight = operands
    return _is_cudas([value, *weight])


def _bytes_of_rows(operands: Sequence[Operand]) -> int:
    """Bound the sums and their copies that the mean over several dims makes: two numbers of each row."""
    value, *_ = operands
    return 2 * 8 * math.prod(value.shape[:-1])


_READS = ("value", "num_dims", "rstd", "weight", "eps")

_kernel = Kernel(
    name="rms_norm_kernel",
    takes=("value", "num_dims", "weight", "eps"),
    run=rms_norm,
    meta=_meta,
    results=("result", "rstd"),
    scratch={"cpu": _bytes_of_rows},
    is_one_kernel=_is_cudas,
    written_out=_written_out,
    derivatives=(
        Derivative(
            name="rms_norm_kernel_backward",
            run=_of_value,
            meta=lambda grad, value, *_: TensorProxy(like=value),
            fake=_fake_of_value,
            of=("value",),
            reads=_READS,
            is_one_kernel=_is_cudas_backward,
            written_out=_of_value_written_out,
        ),
        Derivative(
            name="rms_norm_kernel_weight_backward",
            run=_of_weight,
            meta=_like_weight,
            fake=lambda grad, value, num_dims, rstd, weight, *_: torch.empty_like(weight),
            of=("weight",),
            reads=_READS,
            is_one_kernel=_is_cudas_backward,
            written_out=_of_weight_written_out,
        ),
    ),
)


def _of_torch(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return call_kernel(_kernel, input, len(normalized_shape), weight, eps)


OPERATIONS = (
    Operation(
        name="rms_norm",
        functions=(torch.rms_norm, F.rms_norm),
        run=_of_torch,
        kernels=(_kernel,),
    ),
)
