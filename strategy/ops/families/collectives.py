"""The collectives of a trace as operators, and predicates that recognise them in an executed trace.

Each but `all_reduce_largest` returns the future of its result, which Thunder's `wait` takes; reductions give the mean
over the ranks. Those for several tensors return a future for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from thunder.core.dtypes import to_dtype
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.distributed.transport import (
    Handle,
    largest_of_ranks,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from thunder_memsave.ops.host_copies.weights import is_fetch

_WAIT = "torch_wait_prim_impl"  # Thunder's own
Started = tuple[Handle, Tensor]

collectives_executor = OperatorExecutor("thunder_memsave_collectives", version="0")
register_executor(collectives_executor)


def _all_gather_bucket(
    shards: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype
) -> tuple[Started, ...]:
    return tuple(start_all_gather([s.to(dtype) for s in shards], group))


def _reduce_scatter_bucket(
    whole: Sequence[Tensor], group: dist.ProcessGroup
) -> tuple[Started, ...]:
    return tuple(start_reduce_scatter(whole, group, mean=True))


def _all_reduce_bucket(
    values: Sequence[Tensor], group: dist.ProcessGroup, in_place: bool
) -> tuple[Started, ...]:
    reduced = values if in_place else [v.clone() for v in values]
    return tuple(start_all_reduce(reduced, group, mean=True))


def _all_gather(shard: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Started:
    return _all_gather_bucket([shard], group, dtype)[0]


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Started:
    return _reduce_scatter_bucket([whole], group)[0]


def _all_reduce(values: Tensor, group: dist.ProcessGroup, in_place: bool) -> Started:
    return _all_reduce_bucket([values], group, in_place)[0]


def _whole(shard: TensorProxy, group: dist.ProcessGroup, dtype: torch.dtype) -> FutureTensorProxy:
    shape = (shard.shape[0] * group.size(), *shard.shape[1:])
    return FutureTensorProxy(shape=shape, dtype=to_dtype(dtype), device=shard.device)


def _rows(whole: TensorProxy, group: dist.ProcessGroup) -> FutureTensorProxy:
    shape = (whole.shape[0] // group.size(), *whole.shape[1:])
    return FutureTensorProxy(shape=shape, dtype=whole.dtype, device=whole.device)


def _joined(values: Sequence[TensorProxy], _: dist.ProcessGroup) -> TensorProxy:
    return TensorProxy(like=values[0], shape=(len(values),))


def _same(values: TensorProxy, *_: object) -> FutureTensorProxy:
    return FutureTensorProxy(shape=values.shape, dtype=values.dtype, device=values.device)


_register = collectives_executor.register_operator

all_gather = _register("all_gather_rows", meta=_whole, fn=_all_gather)
"""`(shard, group, torch dtype) -> future` of the whole parameter in that dtype."""

all_gather_bucket = _register(
    "all_gather_bucket",
    meta=lambda shards, group, dtype: tuple(_whole(s, group, dtype) for s in shards),
    fn=_all_gather_bucket,
)
"""`([shard, ...], group, torch dtype) -> (future, ...)` of whole parameters in that dtype, in one collective."""

reduce_scatter = _register("reduce_scatter_rows", meta=_rows, fn=_reduce_scatter)
"""`(whole, group) -> future` of this rank's rows of the mean."""

reduce_scatter_bucket = _register(
    "reduce_scatter_bucket",
    meta=lambda whole, group: tuple(_rows(w, group) for w in whole),
    fn=_reduce_scatter_bucket,
)
"""`([whole, ...], group) -> (future, ...)` of this rank's rows of the means, in one collective."""

all_reduce = _register("all_reduce_values", meta=_same, fn=_all_reduce)
"""`(values, group, in_place) -> future` of the mean."""

all_reduce_bucket = _register(
    "all_reduce_bucket",
    meta=lambda values, group, in_place: tuple(map(_same, values)),
    fn=_all_reduce_bucket,
)
"""`([values, ...], group, in_place) -> (future, ...)` of the means."""


all_reduce_largest = _register("all_reduce_largest", meta=_joined, fn=largest_of_ranks)
"""`([value, ...], group) -> values` of shape `[n]`, the largest over the ranks of each of shape `[1]`: no future."""


def is_all_gather(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol gathers one parameter, its first argument, or fetches it."""
    return bsym.sym is all_gather or is_fetch(bsym)


def is_reduce_scatter(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol starts a reduce-scatter of its first argument."""
    return bsym.sym is reduce_scatter


def is_all_reduce(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol starts an all-reduce of its first argument."""
    return bsym.sym is all_reduce


def is_all_reduce_largest(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol takes the largest numbers over the ranks."""
    return bsym.sym is all_reduce_largest


def gathers(bsym: BoundSymbol) -> Sequence[tuple[TensorProxy, FutureTensorProxy]]:
    """Return (shard, future of the whole) for each parameter that an executed trace's symbol gathers."""
    if bsym.sym is all_gather_bucket:
        return list(zip(bsym.args[0], bsym.output, strict=True))
    return [(bsym.args[0], bsym.output)] if is_all_gather(bsym) else []


def is_wait(bsym: BoundSymbol) -> bool:
    """Return whether an executed trace's symbol waits for a collective."""
    return bool(bsym.sym.name == _WAIT)
