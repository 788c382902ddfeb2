"""Attention as single operators with backwards of their own: PyTorch's kernels for the CPU and for CUDA.

Each takes `(query, key, value, mask, is_causal, scale)` and saves its output and the logarithms of the sums of each
row, never the scores. None draws random numbers, so dropout is not theirs.

They are chosen by the device that a trace is for, without asking a device that is there: a plan that is made on a
machine without the GPU holds what the GPU will hold. Thunder's own executors ask the GPU, and decompose without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from thunder.core import dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

attention_executor = OperatorExecutor("thunder_memsave_attention", version="0")
register_executor(attention_executor)

# The kernel wants rows of the mask to start at multiples of 16 bytes; PyTorch pads to as many columns.
_MASK_COLUMNS = 16

Forward = Callable[..., tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


def _operator(
    name: str, *, forward: Forward, backward: Backward, num_logsumexp: Callable[[int], int]
) -> Symbol:
    """Make a symbol that the executor claims as `name`, and its gradient as `name_backward`.

    Args:
        name: In the trace that runs.
        forward: `(query, key, value, *settings) -> (output, logsumexp)`.
        backward: `(grad, query, key, value, output, logsumexp, *settings) -> three gradients`.
        num_logsumexp: Numbers per head that the kernel writes for so many queries.
    """

    def forward_meta(query: TensorProxy, *_: Any) -> tuple[TensorProxy, TensorProxy]:
        logsumexp = TensorProxy(
            shape=(*query.shape[:-2], num_logsumexp(query.shape[-2])),
            device=query.device,
            dtype=_accumulate_dtype(query.dtype),
        )
        return TensorProxy(like=query), logsumexp

    def backward_meta(
        grad: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, *_: Any
    ) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
        return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)

    run = attention_executor.register_operator(name, meta=forward_meta, fn=forward)
    differentiate = attention_executor.register_operator(
        f"{name}_backward", meta=backward_meta, fn=backward
    )

    def execution(*operands: Any) -> TensorProxy:
        return run(*operands)[0]

    def with_gradient(
        query: TensorProxy, key: TensorProxy, value: TensorProxy, *settings: Any
    ) -> TensorProxy:
        output, logsumexp = run(query, key, value, *settings)
        grad = prims.get_grad(output)
        grads = differentiate(grad, query, key, value, output, logsumexp, *settings)
        for operand, gradient in zip((query, key, value), grads, strict=True):
            prims.put_grad(operand, gradient)
        return output

    def meta(query: TensorProxy, *_: Any) -> TensorProxy:
        return TensorProxy(like=query)

    symbol = Symbol(f"{name}_prim", meta=meta, id=f"thunder_memsave.{name}", is_prim=True)
    attention_executor.register_implementation(
        symbol, execution_transform=execution, grad_transform=with_gradient
    )
    return symbol


def _accumulate_dtype(dtype: Any) -> Any:
    return dtypes.float64 if dtype is dtypes.float64 else dtypes.float32


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def _cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        grad, query, key, value, output, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, _: None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    results = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return results[0], results[1]


def _flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    _: None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    # The state of a generator, which is read for dropout only.
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    offset = torch.empty((), dtype=torch.uint64, device=query.device)
    lengths = (None, None, query.shape[-2], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad,
        query,
        key,
        value,
        output,
        logsumexp,
        *lengths,
        0.0,
        is_causal,
        seed,
        offset,
        scale=scale,
    )


def _efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    bias = _bias(mask, query, key)
    results = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, is_causal, scale=scale
    )
    return results[0], results[1]


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
    wanted = [True, True, True, False]
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad,
        query,
        key,
        value,
        _bias(mask, query, key),
        output,
        logsumexp,
        seed,
        offset,
        0.0,
        wanted,
        is_causal,
        scale=scale,
    )
    return grads[0], grads[1], grads[2]


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as what is added to the scores, made for one call: kept, it would be twice the mask's bytes."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        allowed = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, allowed, torch.full_like(allowed, -math.inf))
    is_aligned = mask.stride(-1) == 1 and not any(s % _MASK_COLUMNS for s in mask.stride()[:-1])
    if not is_aligned:
        mask = mask.expand(*mask.shape[:-1], key.shape[-2])
        mask = F.pad(mask, (0, -mask.shape[-1] % _MASK_COLUMNS))[..., : key.shape[-2]]
    return mask.to(query.dtype).expand(*query.shape[:-1], key.shape[-2])


cpu_flash = _operator(
    "cpu_flash_attention",
    forward=_cpu_forward,
    backward=_cpu_backward,
    num_logsumexp=lambda num_queries: num_queries,
)
"""For the CPU: any mask that is added, of 2 or 4 dimensions."""

cuda_flash = _operator(
    "cuda_flash_attention",
    forward=_flash_forward,
    backward=_flash_backward,
    num_logsumexp=lambda num_queries: num_queries,
)
"""For CUDA: no mask; keys and values may have fewer heads than queries (grouped queries)."""

cuda_efficient = _operator(
    "cuda_efficient_attention",
    forward=_efficient_forward,
    backward=_efficient_backward,
    num_logsumexp=lambda num_queries: -(-num_queries // 32) * 32,
)
"""For CUDA: any mask, boolean or added."""
