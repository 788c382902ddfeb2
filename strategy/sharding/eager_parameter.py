"""Gathers a parameter for eager code, and averages its gradient over the ranks in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.transport import start_all_reduce, start_reduce_scatter
from thunder_memsave.sharding.rows import gather_full
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded


def whole_for_eager(p: nn.Parameter, data_parallel: DataParallel) -> Tensor:
    """Return the whole parameter, differentiable: its gradient becomes this rank's rows of the mean over all ranks.

    A collective, and another one in backward, which all ranks must reach in the same order.
    """
    whole: Tensor = _Whole.apply(p, data_parallel)  # type: ignore[no-untyped-call]
    return whole


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Tensor, data_parallel: DataParallel) -> Tensor:
        ctx.data_parallel, ctx.is_sharded = data_parallel, is_sharded(p)
        ctx.shape, ctx.dtype = as_rows(p).shape, p.dtype
        with torch._C.DisableTorchFunctionSubclass():
            whole = gather_full(p, data_parallel)
            # No view: eager code that writes to it is told about the write, not about views.
            gathered = whole._base if ctx.is_sharded else None
            return (
                gathered
                if gathered is not None and gathered.shape == whole.shape
                else whole.clone()
            )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        data_parallel: DataParallel = ctx.data_parallel
        wanted = data_parallel.reduce_dtype or ctx.dtype
        grad = grad.to(torch.promote_types(ctx.dtype, wanted))
        if not ctx.is_sharded:
            reduced = _ended(start_all_reduce([grad.clone()], data_parallel.everyone, mean=True))
            return reduced.to(ctx.dtype), None
        padding = ctx.shape[0] * data_parallel.world_size - grad.shape[0]
        grad = F.pad(grad, (0, 0) * (grad.dim() - 1) + (0, padding))
        rows = _ended(start_reduce_scatter([grad], data_parallel.group, mean=True))
        if data_parallel.replicas is not None:
            rows = _ended(start_all_reduce([rows], data_parallel.replicas, mean=True))
        return rows.to(ctx.dtype), None


def _ended(started: Any) -> Tensor:
    ((handle, result),) = started
    handle.wait()
    reduced: Tensor = result
    return reduced
