"""Activations: functions of one tensor, with one kernel of PyTorch's each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import thunder.torch as ltorch
import torch
import torch.nn.functional as F
from thunder.core.symbol import Symbol
from torch import Tensor

from thunder_memsave.ops.claim import claim, kernels_executor
from thunder_memsave.ops.operation import Derivative, Kernel, Operation, is_float

_aten = torch.ops.aten


def _gelu(value: Tensor, approximate: str) -> Tensor:
    return F.gelu(value, approximate=approximate)


def _gelu_backward(grad: Tensor, value: Tensor, approximate: str) -> Tensor:
    return _aten.gelu_backward(grad, value, approximate=approximate)  # type: ignore[no-any-return]


def _relu_backward(grad: Tensor, result: Tensor) -> Tensor:
    return _aten.threshold_backward(grad, result, 0)  # type: ignore[no-any-return]


def _value_alone(value: Any, inplace: bool = False) -> tuple[Any, ...]:
    return (value,)


def _applies(value: Any, inplace: bool = False) -> bool:
    return is_float(value) and not inplace


def _activation(
    name: str,
    *,
    functions: tuple[Callable[..., Any], ...],
    symbol: Symbol,
    run: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    reads: tuple[str, ...],
    takes: tuple[str, ...] = ("value",),
    arguments: Callable[..., tuple[Any, ...]] = _value_alone,
    applies: Callable[..., bool] = _applies,
) -> Operation:
    kernel = Kernel(
        name=f"{name}_kernel",
        executor=kernels_executor,
        symbol=symbol,
        takes=takes,
        arguments=arguments,
        applies=applies,
        run=run,
        derivatives=(
            Derivative(name=f"{name}_kernel_backward", run=backward, of=("value",), reads=reads),
        ),
    )
    return Operation(name=name, functions=functions, kernels=(claim(kernel),))


OPERATIONS = (
    _activation(
        "gelu",
        functions=(F.gelu,),
        symbol=ltorch.gelu,
        takes=("value", "approximate"),
        arguments=lambda value, approximate="none": (value, approximate),
        applies=lambda value, approximate="none": is_float(value),
        run=_gelu,
        backward=_gelu_backward,
        reads=("value", "approximate"),
    ),
    _activation(
        "silu",
        functions=(F.silu,),
        symbol=ltorch.silu,
        run=F.silu,
        backward=_aten.silu_backward,
        reads=("value",),
    ),
    _activation(
        "relu",
        functions=(F.relu, torch.relu, Tensor.relu),
        symbol=ltorch.relu,
        run=torch.relu,
        backward=_relu_backward,
        reads=("result",),
    ),
    _activation(
        "tanh",
        functions=(torch.tanh, Tensor.tanh),
        symbol=ltorch.tanh,
        run=torch.tanh,
        backward=_aten.tanh_backward,
        reads=("result",),
    ),
    _activation(
        "sigmoid",
        functions=(torch.sigmoid, Tensor.sigmoid, F.sigmoid),
        symbol=ltorch.sigmoid,
        run=torch.sigmoid,
        backward=_aten.sigmoid_backward,
        reads=("result",),
    ),
)
