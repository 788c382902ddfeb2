"""Layer norm, with PyTorch's kernels: one forward, and one backward for each of what may be frozen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_memsave.ops.claim import claim, kernels_executor
from thunder_memsave.ops.operation import Derivative, Kernel, Operand, Operation, is_float

_backward = torch.ops.aten.native_layer_norm_backward


def _meta(
    value: TensorProxy, num_dims: int, *_: Any
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    on_cuda = value.device.devicetype is devices.DeviceType.CUDA
    is_half = value.dtype in (dtypes.bfloat16, dtypes.float16)
    statistics = TensorProxy(
        shape=(*value.shape[: value.ndim - num_dims], *(1,) * num_dims),
        device=value.device,
        dtype=dtypes.float32 if on_cuda and is_half else value.dtype,
    )
    return TensorProxy(like=value), statistics, TensorProxy(like=statistics)


def layer_norm(
    value: Tensor, num_dims: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized value, and the mean and reciprocal deviation of each row."""
    return torch.native_layer_norm(value, value.shape[-num_dims:], weight, bias, eps)


def _of_value(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    wanted = [True, False, False]
    shape = value.shape[-num_dims:]
    grads = _backward(grad, value, shape, mean, rstd, weight, None, wanted)
    return grads[0]  # type: ignore[no-any-return]


def _of_parameters(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    wanted = [False, weight is not None, bias is not None]
    shape = value.shape[-num_dims:]
    grads = _backward(grad, value, shape, mean, rstd, weight, bias, wanted)
    return tuple(g for g, is_wanted in zip(grads, wanted, strict=True) if is_wanted)


def _like_parameters(
    _: TensorProxy,
    __: TensorProxy,
    ___: int,
    ____: TensorProxy,
    _____: TensorProxy,
    *parameters: TensorProxy | None,
) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=p) for p in parameters if p is not None)


def _applies(
    value: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> bool:
    parameters = [p for p in (weight, bias) if p is not None]
    return is_float(value) and all(p.dtype is value.dtype for p in parameters)


def _arguments(
    value: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> Sequence[Any]:
    return value, len(normalized_shape), weight, bias, eps


def _partial_sums_bytes(operands: Sequence[Operand]) -> int:
    """Per thread, a row for each parameter, in the value's dtype (layer_norm_kernel.cpp)."""
    _, value, _, _, parameter, *_ = operands
    num_threads = torch.get_num_threads()
    return 2 * num_threads * math.prod(parameter.shape) * value.dtype.itemsize


_kernel = claim(
    Kernel(
        name="layer_norm_kernel",
        executor=kernels_executor,
        symbol=ltorch.layer_norm,
        takes=("value", "num_dims", "weight", "bias", "eps"),
        arguments=_arguments,
        applies=_applies,
        run=layer_norm,
        meta=_meta,
        results=("result", "mean", "rstd"),
        derivatives=(
            Derivative(
                name="layer_norm_kernel_backward",
                run=_of_value,
                meta=lambda grad, value, *_: TensorProxy(like=value),
                of=("value",),
                reads=("value", "num_dims", "mean", "rstd", "weight"),
            ),
            Derivative(
                name="layer_norm_kernel_affine_backward",
                run=_of_parameters,
                meta=_like_parameters,
                of=("weight", "bias"),
                reads=("value", "num_dims", "mean", "rstd", "weight", "bias"),
                scratch={"cpu": _partial_sums_bytes},
            ),
        ),
    )
)

OPERATIONS = (Operation(name="layer_norm", functions=(F.layer_norm,), kernels=(_kernel,)),)
