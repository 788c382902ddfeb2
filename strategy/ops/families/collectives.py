"""The collectives of a trace as operators, and predicates that recognise them in an executed trace.

Like Thunder's, these return `(handle, tensor)`, which its `wait` takes. Those for several tensors return one such pair
for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import thunder.torch as ltorch
import torch
import torch.distributed as dist
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import (
    DistParallelType,
    FutureTensorProxy,
    TensorProxy,
)
from thunder.core.symbol import BoundSymbol
from thunder.distributed import prims as dist_prims
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.distributed.transport import (
    Handle,
    all_gather_single,
    reduce_scatter_single,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

_ALL_GATHER = "all_gather_rows"
_CAST_AND_ALL_GATHER = "cast_and_all_gather_rows"
_ALL_GATHER_BUCKET = "all_gather_bucket"
_REDUCE_SCATTER = "reduce_scatter_rows"
_REDUCE_SCATTER_BUCKET = "reduce_scatter_bucket"
_ALL_REDUCE = "all_reduce_values"
_ALL_REDUCE_BUCKET = "all_reduce_bucket"
_WAIT = "torch_wait_prim_impl"  # Thunder's own
_SUM_OR_MEAN = (dist_prims.DistributedReduceOps.SUM, dist_prims.DistributedReduceOps.AVG)

collectives_executor = OperatorExecutor("thunder_memsave_collectives", version="0")
register_executor(collectives_executor)


def _is_mean(op: Any) -> bool:
    return op is dist_prims.DistributedReduceOps.AVG


def _all_gather(
    shard: Tensor, group: dist.ProcessGroup, do_async: bool, dim: int | None = None
) -> Tensor | tuple[Handle, Tensor]:
    if do_async:
        return start_all_gather([shard], group)[0]
    whole = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    all_gather_single(whole, shard.contiguous(), group)
    return whole


def _reduce_scatter(
    whole: Tensor, op: Any, group: dist.ProcessGroup, do_async: bool, dim: int | None = None
) -> Tensor | tuple[Handle, Tensor]:
    if do_async and op in _SUM_OR_MEAN:
        return start_reduce_scatter([whole], group, mean=_is_mean(op))[0]
    shard = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    reduce_op = ltorch.to_torch_distributed_reduce_op(op)
    work = reduce_scatter_single(shard, whole.contiguous(), reduce_op, group, bool(do_async))
    return (work, shard) if do_async else shard


def _all_reduce(
    values: Tensor, op: Any, group: dist.ProcessGroup, do_async: bool, skip_clone: bool = False
) -> Tensor | tuple[Handle, Tensor]:
    reduced = values if skip_clone else values.clone()
    if do_async and op in _SUM_OR_MEAN:
        return start_all_reduce([reduced], group, mean=_is_mean(op))[0]
    reduce_op = ltorch.to_torch_distributed_reduce_op(op)
    work = dist.all_reduce(reduced, reduce_op, group, async_op=bool(do_async))
    return (work, reduced) if do_async else reduced


def _all_gather_bucket(
    shards: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype
) -> tuple[tuple[Handle, Tensor], ...]:
    return tuple(start_all_gather([s.to(dtype) for s in shards], group))


def _reduce_scatter_bucket(
    whole: Sequence[Tensor], op: Any, group: dist.ProcessGroup
) -> tuple[tuple[Handle, Tensor], ...]:
    return tuple(start_reduce_scatter(whole, group, mean=_is_mean(op)))


def _all_reduce_bucket(
    values: Sequence[Tensor], op: Any, group: dist.ProcessGroup, skip_clone: bool
) -> tuple[tuple[Handle, Tensor], ...]:
    reduced = values if skip_clone else [v.clone() for v in values]
    return tuple(start_all_reduce(reduced, group, mean=_is_mean(op)))


def _cast_and_all_gather(
    shard: Tensor, group: dist.ProcessGroup, dtype: torch.dtype
) -> tuple[Handle, Tensor]:
    return start_all_gather([shard.to(dtype)], group)[0]


def _whole(shard: TensorProxy, group: dist.ProcessGroup, dtype: torch.dtype) -> FutureTensorProxy:
    shape = (shard.shape[0] * group.size(), *shard.shape[1:])
    return FutureTensorProxy(shape=shape, dtype=to_dtype(dtype), device=shard.device)


def _rows(whole: TensorProxy, group: dist.ProcessGroup) -> FutureTensorProxy:
    shape = (whole.shape[0] // group.size(), *whole.shape[1:])
    return FutureTensorProxy(shape=shape, dtype=whole.dtype, device=whole.device)


def _same(values: TensorProxy) -> FutureTensorProxy:
    return FutureTensorProxy(shape=values.shape, dtype=values.dtype, device=values.device)


cast_and_all_gather = collectives_executor.register_operator(
    _CAST_AND_ALL_GATHER, meta=_whole, fn=_cast_and_all_gather
)
"""`(shard, group, torch dtype) -> future` of the whole parameter in that dtype."""

all_gather_bucket = collectives_executor.register_operator(
    _ALL_GATHER_BUCKET,
    meta=lambda shards, group, dtype: tuple(_whole(s, group, dtype) for s in shards),
    fn=_all_gather_bucket,
)
"""`([shard, ...], group, torch dtype) -> (future, ...)` of whole parameters in that dtype, in one collective."""

reduce_scatter_bucket = collectives_executor.register_operator(
    _REDUCE_SCATTER_BUCKET,
    meta=lambda whole, op, group: tuple(_rows(w, group) for w in whole),
    fn=_reduce_scatter_bucket,
)
"""`([whole, ...], op, group) -> (future, ...)` of this rank's rows of the sums or means, in one collective."""


all_reduce_bucket = collectives_executor.register_operator(
    _ALL_REDUCE_BUCKET,
    meta=lambda values, op, group, skip_clone: tuple(map(_same, values)),
    fn=_all_reduce_bucket,
)
"""`([values, ...], op, group, skip_clone) -> (future, ...)` of the sums or means; `skip_clone`: in place."""


def is_all_gather(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol gathers one parameter, its first argument.

    False for collectives that the user's own code calls.
    """
    if bsym.sym.name not in (_ALL_GATHER, _CAST_AND_ALL_GATHER):
        return False
    is_parameter = bsym.args[0].distparallel_type is DistParallelType.FULLY_SHARDED
    return bool(is_parameter) and isinstance(bsym.output, FutureTensorProxy)


def is_reduce_scatter(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol starts a reduce-scatter (sum or mean) of its first argument."""
    if bsym.sym.name != _REDUCE_SCATTER or not isinstance(bsym.output, FutureTensorProxy):
        return False
    return bsym.args[1] in _SUM_OR_MEAN


def is_all_reduce(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol starts an all-reduce (sum or mean) of its first argument."""
    if bsym.sym.name != _ALL_REDUCE or not isinstance(bsym.output, FutureTensorProxy):
        return False
    return bsym.args[1] in _SUM_OR_MEAN


def reduces_in_place(all_reduce: BoundSymbol) -> bool:
    """Return whether an all-reduce of an executed trace overwrites its input, which nothing else reads then."""
    return bool(all_reduce.args[4]) if len(all_reduce.args) > 4 else False


def gathers(bsym: BoundSymbol) -> Sequence[tuple[TensorProxy, FutureTensorProxy]]:
    """Return (shard, future of the whole) for each parameter that an executed trace's symbol gathers."""
    if bsym.sym.name == _ALL_GATHER_BUCKET:
        return list(zip(bsym.args[0], bsym.output, strict=True))
    return [(bsym.args[0], bsym.output)] if is_all_gather(bsym) else []


def is_wait(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol waits for a collective."""
    return bool(bsym.sym.name == _WAIT)


def _along_rows(*args: Any, dim: int | None = None, **_: Any) -> bool:
    return dim in (None, 0)


for _prim, _name, _run in (
    (dist_prims.all_gather, _ALL_GATHER, _all_gather),
    (dist_prims.reduce_scatter, _REDUCE_SCATTER, _reduce_scatter),
    (dist_prims.all_reduce, _ALL_REDUCE, _all_reduce),
):
    collectives_executor.register_implementation(
        _prim,
        collectives_executor.register_operator(_name, like=_prim, fn=_run),
        checker=_along_rows,
    )
