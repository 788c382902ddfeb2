"""PyTorch's attention kernels for CUDA, each as one operator with its own backward, and the scratch of all of them.

Each takes `(query, key, value, mask, is_causal, scale)` and saves its output and the logsumexp of each row, never the
scores. None supports dropout.

The device that a trace is for selects the kernel, without querying a GPU, so that a plan made on a machine without one
has the bytes of a real run. PyTorch, traced without a GPU, would choose a kernel for the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from torch import Tensor

from thunder_memsave.aten.record import CUDA_BLOCK_BYTES
from thunder_memsave.ops.operation import (
    NO_SCRATCH,
    Derivative,
    Foreign,
    Kernel,
    Numbers,
    Operand,
    Scratch,
)

# The kernel wants rows of the mask to start at multiples of 16 bytes; PyTorch pads to as many columns.
_MASK_COLUMNS = 16

_ROWS = 128
"""Flash attention's backward rounds sequences up to this (flash_attn/flash_api.cpp)."""

_STATE_BYTES = 4 * CUDA_BLOCK_BYTES
"""Seed and offset, and what else cuDNN takes."""

Shape = tuple[int, ...]
Forward = Callable[..., tuple[Tensor, Tensor]]
Gradients = tuple[Tensor, Tensor, Tensor]
Backward = Callable[..., Gradients]


class Saved(NamedTuple):
    """The tensors that each backward reads."""

    grad: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    logsumexp: Tensor


def attention_kernel(
    name: str,
    *,
    forward: Forward,
    backward: Backward,
    settings: tuple[str, ...] = ("mask", "is_causal", "scale"),
    logsumexp: Callable[[Shape], Shape] = lambda query: query[:-1],
    scratch: Mapping[str, Scratch] = NO_SCRATCH,
    backward_scratch: Mapping[str, Scratch] = NO_SCRATCH,
    numbers: Numbers | None = None,
) -> Kernel:
    """Make the row of a kernel; `attention.py` and its neighbours choose between them.

    Args:
        name: The operator's name in the executed trace.
        forward: `(query, key, value, *settings) -> (output, logsumexp)`.
        backward: `(saved, *settings) -> three gradients`.
        settings: Names of the other arguments.
        logsumexp: `(shape of the queries) -> shape` of the numbers that forward writes for backward.
        scratch: Formulas of the bytes that `forward` takes inside, by device type.
        backward_scratch: Those of `backward`.
        numbers: See `Kernel`.
    """
    operands = ("query", "key", "value")
    gradients = Derivative(
        name=f"{name}_backward",
        run=_of_saved(backward),
        meta=_like_operands,
        of=operands,
        reads=(*operands, "output", "logsumexp", *settings),
        scratch=backward_scratch,
    )
    return Kernel(
        name=name,
        takes=(*operands, *settings),
        run=forward,
        meta=_meta(logsumexp),
        results=("output", "logsumexp"),
        derivatives=(gradients,),
        scratch=scratch,
        numbers=numbers,
    )


def _of_saved(backward: Backward) -> Backward:
    """Return the same backward of tensors one by one."""
    num_tensors = len(Saved._fields)
    return lambda *given: backward(Saved(*given[:num_tensors]), *given[num_tensors:])


def _meta(shape: Callable[[Shape], Shape]) -> Callable[..., tuple[TensorProxy, TensorProxy]]:
    def meta(query: TensorProxy, *_: Any) -> tuple[TensorProxy, TensorProxy]:
        logsumexp = TensorProxy(
            shape=shape(tuple(query.shape)),
            device=query.device,
            dtype=_accumulate_dtype(query.dtype),
        )
        return TensorProxy(like=query), logsumexp

    return meta


def _like_operands(
    grad: TensorProxy, query: TensorProxy, key: TensorProxy, value: TensorProxy, *_: Any
) -> tuple[TensorProxy, TensorProxy, TensorProxy]:
    return TensorProxy(like=query), TensorProxy(like=key), TensorProxy(like=value)


def _accumulate_dtype(dtype: Any) -> Any:
    return dtypes.float64 if dtype is dtypes.float64 else dtypes.float32


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, _: None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    results = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return results[0], results[1]


def _flash_backward(saved: Saved, _: None, is_causal: bool, scale: float | None) -> Gradients:
    lengths = (None, None, saved.query.shape[-2], saved.key.shape[-2])
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        *saved, *lengths, 0.0, is_causal, *no_dropout(saved.query), scale=scale
    )


def no_dropout(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the state of a generator for flash attention's backward, which reads it for dropout only."""
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)
    return seed, torch.empty((), dtype=torch.uint64, device=query.device)


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, _: None, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, False, scale=scale
    )
    return results[0], results[1]


def _cudnn_backward(saved: Saved, _: None, is_causal: bool, scale: float | None) -> Gradients:
    no_mask_and_no_documents = (None, None, None)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        *(*saved, *_seed_and_offset(saved.query)),
        *no_mask_and_no_documents,
        *(saved.query.shape[-2], saved.key.shape[-2], 0.0, is_causal),
        scale=scale,
    )


def _seed_and_offset(query: Tensor) -> tuple[Tensor, Tensor]:
    """Return what other backwards read for dropout only (native/cudnn/MHA.cpp)."""
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    return seed, torch.empty_like(seed)


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
    saved: Saved, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Gradients:
    grad, query, key, value, *results = saved
    bias, wanted = _bias(mask, query, key), [True, True, True, False]
    grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(grad, query, key, value, bias, *results, *_seed_and_offset(query)),
        *(0.0, wanted, is_causal),
        scale=scale,
    )
    return grads[0], grads[1], grads[2]


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask as an additive bias. Made per call: kept, a bias would take at least twice the mask's bytes."""
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


def cpu_blocks_bytes(operands: Sequence[Operand]) -> int:
    """Per thread, one block of scores and of the output in float32 (FlashAttentionKernel.cpp)."""
    head_dim = operands[0].shape[-1]
    rows, columns = 256, 512  # the largest blocks that the kernel chooses
    per_thread = rows * columns + 2 * rows + rows * head_dim
    return torch.get_num_threads() * (4 * per_thread + 2 * rows * columns)


def cuda_backward_bytes(operands: Sequence[Operand]) -> int:
    """Bound what flash attention's backward allocates inside (pytorch's flash_api.cpp, `mha_bwd`), and cuDNN's.

    That is a float32 gradient of the query, a float32 number per row, both with rounded sizes, where key heads are
    shared one gradient of key and value per query head, and the state of a generator that nothing reads. cuDNN's
    workspace has the same parts, not rounded (cudnn-frontend, `SDPABackwardNodeBase`: `dQ_accum`, `softmax_sum`,
    `dK_fullhead`, `dV_fullhead`), and a few bytes more, seen on an H200. The first three of four dimensions are batch,
    heads and rows, in either order.
    """
    of_four = [v for v in operands if len(v.shape) == 4]
    if len(of_four) < 4:
        return 0
    _, query, key, _ = of_four[:4]
    batch, _, rows, _ = query.shape
    return flash_backward_bytes(query, key, num_rows=batch * _rounded(rows, _ROWS))


def flash_backward_bytes(query: Operand, key: Operand, *, num_rows: int) -> int:
    """Return the bytes of flash attention's backward for so many rows of queries per head."""
    _, heads, _, head_dim = query.shape
    columns = _rounded(head_dim, 32 if head_dim <= 128 else 64)
    accumulated = 4 * num_rows * heads * (columns + 1)
    shares_keys = math.prod(key.shape) < math.prod(query.shape)
    expanded = 2 * query.dtype.itemsize * math.prod(query.shape) if shares_keys else 0
    return accumulated + expanded + _STATE_BYTES


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _of_pytorch(operator: str, operands: Sequence[Operand]) -> int:
    if operands[0].device.startswith("cpu"):
        return cpu_blocks_bytes(operands)
    is_backward = "backward" in operator or "bwd" in operator
    return cuda_backward_bytes(operands) if is_backward else 0


cuda_flash = attention_kernel(
    "cuda_flash_attention",
    forward=_flash_forward,
    backward=_flash_backward,
    backward_scratch={"cuda": cuda_backward_bytes},
)
"""CUDA flash kernel: takes no mask; keys and values may have fewer heads than queries (grouped queries)."""

cuda_cudnn = attention_kernel(
    "cuda_cudnn_attention",
    forward=_cudnn_forward,
    backward=_cudnn_backward,
    logsumexp=lambda query: (*query[:-1], 1),
    backward_scratch={"cuda": cuda_backward_bytes},
)
"""cuDNN's, for CUDA: as `cuda_flash`. With a mask its gradients may not be numbers, and a mask of another dtype is
misread, silently (github.com/pytorch/pytorch/issues/196678 and /pull/191612), so masks are left to `cuda_efficient`."""

cuda_efficient = attention_kernel(
    "cuda_efficient_attention",
    forward=_efficient_forward,
    backward=_efficient_backward,
    logsumexp=lambda query: (*query[:-2], _rounded(query[-2], 32)),
    backward_scratch={"cuda": cuda_backward_bytes},
)
"""For CUDA: any mask, boolean or added."""

of_pytorch = Foreign(
    matches=lambda operator: "attention" in operator or "sdp" in operator, scratch=_of_pytorch
)
