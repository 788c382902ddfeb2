"""All-gather and reduce-scatter of a trace, run by torch.distributed under the names that this torch has.

torch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`, which Thunder's own implementations call (they
warn since). Like Thunder's, these return `(work, tensor)` when asynchronous, which is what its `wait` takes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_memsave import compat

compat.apply()

import thunder.torch as ltorch  # noqa: E402
from thunder.core.dtypes import to_dtype  # noqa: E402
from thunder.core.proxies import FutureTensorProxy, TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402
from thunder.distributed import prims as dist_prims  # noqa: E402
from thunder.extend import OperatorExecutor, register_executor  # noqa: E402

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ALL_GATHER = "all_gather_rows"
_CAST_AND_ALL_GATHER = "cast_and_all_gather_rows"
_WAIT = "torch_wait_prim_impl"  # Thunder's own

collectives_executor = OperatorExecutor("thunder_memsave_collectives", version="0")
register_executor(collectives_executor)


def _all_gather(
    shard: Tensor, group: dist.ProcessGroup, do_async: bool, dim: int | None = None
) -> Tensor | tuple[Any, Tensor]:
    rows, *rest = shard.shape
    full = torch.empty((rows * group.size(), *rest), dtype=shard.dtype, device=shard.device)
    work = all_gather_single(full, shard.contiguous(), group, bool(do_async))
    return (work, full) if do_async else full


def _reduce_scatter(
    full: Tensor, op: Any, group: dist.ProcessGroup, do_async: bool, dim: int | None = None
) -> Tensor | tuple[Any, Tensor]:
    rows, *rest = full.shape
    shard = torch.empty((rows // group.size(), *rest), dtype=full.dtype, device=full.device)
    reduce_op = ltorch.to_torch_distributed_reduce_op(op)
    work = reduce_scatter_single(shard, full.contiguous(), reduce_op, group, bool(do_async))
    return (work, shard) if do_async else shard


def _cast_and_all_gather(
    shard: Tensor, group: dist.ProcessGroup, dtype: torch.dtype
) -> Tensor | tuple[Any, Tensor]:
    return _all_gather(shard.to(dtype), group, True)


def _meta_of_cast_and_all_gather(
    shard: TensorProxy, group: dist.ProcessGroup, dtype: torch.dtype
) -> FutureTensorProxy:
    rows, *rest = shard.shape
    return FutureTensorProxy(
        shape=(rows * group.size(), *rest), dtype=to_dtype(dtype), device=shard.device
    )


cast_and_all_gather = collectives_executor.register_operator(
    _CAST_AND_ALL_GATHER, meta=_meta_of_cast_and_all_gather, fn=_cast_and_all_gather
)
"""`(shard, group, torch dtype) -> future` of the whole parameter in that dtype."""


def is_all_gather(bsym: BoundSymbol) -> bool:
    """Whether an executed trace's symbol gathers a parameter, given as its first argument."""
    return bsym.sym.name in (_ALL_GATHER, _CAST_AND_ALL_GATHER)


def is_wait(bsym: BoundSymbol) -> bool:
    """Whether an executed trace's symbol waits for a collective."""
    return bsym.sym.name == _WAIT


def _along_rows(*args: Any, dim: int | None = None, **_: Any) -> bool:
    return dim in (None, 0)


for _prim, _name, _run in (
    (dist_prims.all_gather, _ALL_GATHER, _all_gather),
    (dist_prims.reduce_scatter, "reduce_scatter_rows", _reduce_scatter),
):
    collectives_executor.register_implementation(
        _prim,
        collectives_executor.register_operator(_name, like=_prim, fn=_run),
        checker=_along_rows,
    )
