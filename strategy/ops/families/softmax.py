"""Softmax, with one kernel of PyTorch's each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_memsave.ops.claim import claim, kernels_executor
from thunder_memsave.ops.operation import Derivative, Kernel, Operation, is_float


def _backward(grad: Tensor, result: Tensor, dim: int) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, result, dim, result.dtype)  # type: ignore[no-any-return]


def _applies(value: Any, dim: int, *, dtype: Any = None) -> bool:
    return is_float(value) and (dtype is None or dtypes.is_float_dtype(dtypes.to_dtype(dtype)))


def _arguments(value: TensorProxy, dim: int, *, dtype: Any = None) -> Sequence[Any]:
    return value, dim


def _computed_in(value: TensorProxy, dim: int, *, dtype: Any = None) -> Any:
    return dtype


_kernel = claim(
    Kernel(
        name="softmax_kernel",
        executor=kernels_executor,
        symbol=ltorch._softmax,
        takes=("value", "dim"),
        arguments=_arguments,
        cast=_computed_in,
        applies=_applies,
        run=torch.softmax,
        derivatives=(
            Derivative(
                name="softmax_kernel_backward",
                run=_backward,
                of=("value",),
                reads=("result", "dim"),
            ),
        ),
    )
)

OPERATIONS = (Operation(name="softmax", functions=(F.softmax, torch.softmax), kernels=(_kernel,)),)
