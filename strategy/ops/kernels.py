"""Operations whose gradient is one kernel in PyTorch: activations, softmax and layer norm.

Thunder takes them apart, for compilers that fuse the parts again. Run part by part, a GELU's gradient holds five
tensors of its size at once where PyTorch's kernel holds three, and a layer norm's is 20 passes over memory. So where
nothing fuses, these kernels run, and gradients have the bits of eager PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import thunder.torch as ltorch
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

kernels_executor = OperatorExecutor("thunder_memsave_kernels", version="0")
register_executor(kernels_executor)

_aten = torch.ops.aten


def _is_float(value: Any) -> bool:
    return isinstance(value, TensorProxy) and dtypes.is_float_dtype(value.dtype)


def _like_first(value: TensorProxy, *_: Any, **__: Any) -> TensorProxy:
    return TensorProxy(like=value)


def _activation(
    symbol: Symbol,
    name: str,
    *,
    forward: Callable[..., Tensor],
    backward: Callable[..., Tensor],
    of_output: bool = False,
    settings: Callable[..., tuple[Any, ...] | None] = lambda: (),
) -> None:
    """Let a kernel compute `symbol`, and another one its gradient.

    Args:
        symbol: Thunder's, with the value as its only tensor.
        name: In the trace that runs.
        forward: `(value, *settings)`.
        backward: `(gradient of the result, value, *settings)`.
        of_output: Whether `backward` takes the result instead of the value.
        settings: The other arguments of `symbol` as those of the kernels; None: not for these.
    """
    run = kernels_executor.register_operator(name, meta=_like_first, fn=forward)
    differentiate = kernels_executor.register_operator(
        f"{name}_backward", meta=_like_first, fn=backward
    )

    def applies(value: Any, *rest: Any, **keywords: Any) -> bool:
        return _is_float(value) and settings(*rest, **keywords) is not None

    def execution(value: TensorProxy, *rest: Any, **keywords: Any) -> Any:
        return run(value, *(settings(*rest, **keywords) or ()))

    def with_gradient(value: TensorProxy, *rest: Any, **keywords: Any) -> Any:
        chosen = settings(*rest, **keywords) or ()
        result = run(value, *chosen)
        grad = prims.get_grad(result)
        prims.put_grad(value, differentiate(grad, result if of_output else value, *chosen))
        return result

    kernels_executor.register_implementation(
        symbol, checker=applies, execution_transform=execution, grad_transform=with_gradient
    )


def _gelu(value: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(value, approximate=approximate)


def _gelu_backward(grad: Tensor, value: Tensor, approximate: str) -> Tensor:
    return _aten.gelu_backward(grad, value, approximate=approximate)  # type: ignore[no-any-return]


def _not_in_place(inplace: bool = False) -> tuple[Any, ...] | None:
    return None if inplace else ()


_activation(
    ltorch.gelu,
    "gelu_kernel",
    forward=_gelu,
    backward=_gelu_backward,
    settings=lambda approximate="none": (approximate,),
)
_activation(
    ltorch.silu,
    "silu_kernel",
    forward=torch.nn.functional.silu,
    backward=_aten.silu_backward,
    settings=_not_in_place,
)
_activation(
    ltorch.relu,
    "relu_kernel",
    forward=torch.relu,
    backward=lambda grad, result: _aten.threshold_backward(grad, result, 0),
    of_output=True,
    settings=_not_in_place,
)
_activation(
    ltorch.tanh,
    "tanh_kernel",
    forward=torch.tanh,
    backward=_aten.tanh_backward,
    of_output=True,
)
_activation(
    ltorch.sigmoid,
    "sigmoid_kernel",
    forward=torch.sigmoid,
    backward=_aten.sigmoid_backward,
    of_output=True,
)


def _softmax_backward(grad: Tensor, result: Tensor, dim: int) -> Tensor:
    return _aten._softmax_backward_data(grad, result, dim, result.dtype)  # type: ignore[no-any-return]


_run_softmax = kernels_executor.register_operator(
    "softmax_kernel", meta=_like_first, fn=torch.softmax
)
_differentiate_softmax = kernels_executor.register_operator(
    "softmax_kernel_backward", meta=_like_first, fn=_softmax_backward
)


def _softmax_applies(value: Any, dim: int, *, dtype: Any = None) -> bool:
    return _is_float(value) and (dtype is None or dtypes.is_float_dtype(dtypes.to_dtype(dtype)))


def _softmax_execution(value: TensorProxy, dim: int, *, dtype: Any = None) -> Any:
    return _run_softmax(value if dtype is None else ltorch.to(value, dtype), dim)


def _softmax_with_gradient(value: TensorProxy, dim: int, *, dtype: Any = None) -> Any:
    result = _softmax_execution(value, dim, dtype=dtype)
    grad = _differentiate_softmax(prims.get_grad(result), result, dim)
    prims.put_grad(value, ltorch.to(grad, value.dtype))
    return result


kernels_executor.register_implementation(
    ltorch._softmax,
    checker=_softmax_applies,
    execution_transform=_softmax_execution,
    grad_transform=_softmax_with_gradient,
)


def _layer_norm_meta(
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


def _layer_norm(
    value: Tensor, num_dims: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.native_layer_norm(value, value.shape[-num_dims:], weight, bias, eps)


def _layer_norm_value_backward(
    grad: Tensor,
    value: Tensor,
    num_dims: int,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
) -> Tensor:
    wanted = [True, False, False]
    shape = value.shape[-num_dims:]
    grads = _aten.native_layer_norm_backward(grad, value, shape, mean, rstd, weight, None, wanted)
    return grads[0]  # type: ignore[no-any-return]


def _layer_norm_affine_backward(
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
    grads = _aten.native_layer_norm_backward(grad, value, shape, mean, rstd, weight, bias, wanted)
    return tuple(g for g, is_wanted in zip(grads, wanted, strict=True) if is_wanted)


def _affine_meta(
    _: TensorProxy,
    __: TensorProxy,
    ___: int,
    ____: TensorProxy,
    _____: TensorProxy,
    *parameters: TensorProxy | None,
) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=p) for p in parameters if p is not None)


_run_layer_norm = kernels_executor.register_operator(
    "layer_norm_kernel", meta=_layer_norm_meta, fn=_layer_norm
)
_differentiate_value = kernels_executor.register_operator(
    "layer_norm_kernel_backward",
    meta=lambda grad, value, *_: TensorProxy(like=value),
    fn=_layer_norm_value_backward,
)
_differentiate_affine = kernels_executor.register_operator(
    "layer_norm_kernel_affine_backward", meta=_affine_meta, fn=_layer_norm_affine_backward
)


def _layer_norm_applies(
    value: Any,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> bool:
    parameters = [p for p in (weight, bias) if p is not None]
    return _is_float(value) and all(p.dtype is value.dtype for p in parameters)


def _layer_norm_execution(
    value: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> Any:
    return _run_layer_norm(value, len(normalized_shape), weight, bias, eps)[0]


def _layer_norm_with_gradient(
    value: TensorProxy,
    normalized_shape: Sequence[int],
    weight: TensorProxy | None = None,
    bias: TensorProxy | None = None,
    eps: float = 1e-5,
) -> Any:
    """Two symbols for the gradients, so that those of frozen parameters, or of the input alone, can be left out."""
    num_dims = len(normalized_shape)
    result, mean, rstd = _run_layer_norm(value, num_dims, weight, bias, eps)
    grad = prims.get_grad(result)
    prims.put_grad(value, _differentiate_value(grad, value, num_dims, mean, rstd, weight))
    parameters = [p for p in (weight, bias) if p is not None]
    if parameters:
        grads = _differentiate_affine(grad, value, num_dims, mean, rstd, weight, bias)
        for parameter, gradient in zip(parameters, grads, strict=True):
            prims.put_grad(parameter, gradient)
    return result


kernels_executor.register_implementation(
    ltorch.layer_norm,
    checker=_layer_norm_applies,
    execution_transform=_layer_norm_execution,
    grad_transform=_layer_norm_with_gradient,
)
