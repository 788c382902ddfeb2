"""Gathers parameters for eager code, and averages their gradients over the ranks in backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.sharding.mean_gradient import mean_dtype, mean_over_ranks
from thunder_memsave.sharding.rows import gather_full, own_rows, take_rows
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded


def whole_for_eager(
    parameters: Sequence[nn.Parameter], data_parallel: DataParallel
) -> Sequence[Tensor]:
    """Return the whole parameters, differentiable: gradients become this rank's rows of the means over all ranks.

    Collectives; those of backward begin when the gradients of all are there. A parameter that only some ranks used has
    a gradient of zero on the others, and one that none used has none.
    """
    if not parameters:
        return ()
    whole: Sequence[Tensor] = _Wholes.apply(data_parallel, *parameters)  # type: ignore[no-untyped-call]
    for tensor in whole:
        _copy_as_parameter(tensor)
    return whole


def is_written(whole: Tensor, p: nn.Parameter, data_parallel: DataParallel) -> bool:
    """Return whether this rank's rows of a weight that was gathered have other bits now.

    A write through `.data`, such as a moving average's, leaves no trace but the bits.
    """
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        kept, found = as_rows(p), whole.detach()
        if is_sharded(p):
            rows = own_rows(whole.shape, data_parallel)
            found = take_rows(found, rows)
        return not torch.equal(_bits(kept), _bits(found))


def _bits(value: Tensor) -> Tensor:
    """Return the bytes of (rows, ...), so that NaN equals itself."""
    return value.contiguous().flatten().view(torch.uint8)


def _copy_as_parameter(whole: Tensor) -> None:
    """Let `copy.deepcopy` of a module give it a parameter of its own, as in eager; PyTorch copies leaves alone."""
    of = weakref.ref(
        whole
    )  # a tensor that knew itself would stay until the next garbage collection

    def deepcopy(memo: dict[int, Any]) -> nn.Parameter:
        value = of()
        assert value is not None, "it is being copied"
        return nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)

    vars(whole)["__deepcopy__"] = deepcopy


class _Wholes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data_parallel: DataParallel, *parameters: nn.Parameter) -> Any:
        ctx.set_materialize_grads(False)
        ctx.data_parallel, ctx.parameters = data_parallel, parameters
        with torch._C.DisableTorchFunctionSubclass():
            whole = tuple(_whole(p, data_parallel) for p in parameters)
        ctx.shapes = [w.shape for w in whole]
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        data_parallel: DataParallel = ctx.data_parallel
        used = _used_anywhere([g is not None for g in grads], ctx.parameters[0], data_parallel)
        return None, *(
            _reduced(grad, p, shape, data_parallel) if is_used and p.requires_grad else None
            for grad, p, shape, is_used in zip(grads, ctx.parameters, ctx.shapes, used, strict=True)
        )


def _whole(p: nn.Parameter, data_parallel: DataParallel) -> Tensor:
    whole = gather_full(p, data_parallel)
    # No view: eager code that writes to it is told about the write, not about views.
    base = whole._base if is_sharded(p) else None
    return base if base is not None and base.shape == whole.shape else whole.clone()


def _used_anywhere(used: Sequence[bool], like: Tensor, data_parallel: DataParallel) -> list[bool]:
    flags = torch.tensor(used, dtype=torch.int32, device=like.device)
    with collective("agreement on used parameters", data_parallel.everyone):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=data_parallel.everyone)
    return [bool(flag) for flag in flags.tolist()]


def _reduced(
    grad: Tensor | None, p: nn.Parameter, shape: torch.Size, data_parallel: DataParallel
) -> Tensor:
    rows, dtype = as_rows(p), mean_dtype(p, data_parallel)
    if grad is None:
        grad = rows.new_zeros(shape, dtype=dtype)
    own = grad.to(dtype, copy=not is_sharded(p))  # others may read autograd's
    return mean_over_ranks(own, p, data_parallel).to(rows.dtype)
