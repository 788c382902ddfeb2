"""Gathers a sharded or replicated parameter in a trace, and reduces its gradient."""

from __future__ import annotations

from typing import Any

from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import DistParallelType, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad
from torch.distributed import ProcessGroup

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.ops.accumulation import may_keep, with_unreduced
from thunder_memsave.ops.families.collectives import all_gather, all_reduce, reduce_scatter


def unshard(
    proxy: TensorProxy, data_parallel: DataParallel, kind: DistParallelType, *, training: bool
) -> TensorProxy:
    """Return the whole parameter, padding included.

    If it is trained, its gradient is this rank's rows of the mean over all ranks, computed in
    `data_parallel.reduce_dtype`: first within the group, then across the replicas if there are several.
    """
    if training and proxy.requires_grad:
        return _trained(proxy, kind, *_reduction(proxy, data_parallel))
    if kind is DistParallelType.REPLICATED:
        return proxy
    # Unlike a bare gather, Thunder's gradient transform takes this symbol where nothing needs a gradient.
    return (
        _frozen(proxy, kind, data_parallel.group)
        if training
        else _gathered(proxy, data_parallel.group)
    )


def _reduction(proxy: TensorProxy, data_parallel: DataParallel) -> tuple[Any, ...]:
    """Return the settings of `_grad_transform`, as plain arguments of a symbol."""
    wanted = data_parallel.reduce_dtype
    reduce_dtype = proxy.dtype if wanted is None else dtypes.to_dtype(wanted)
    if reduce_dtype.bytes < proxy.dtype.bytes:
        reduce_dtype = proxy.dtype
    return (
        data_parallel.group,
        data_parallel.replicas,
        data_parallel.everyone,
        reduce_dtype,
        may_keep(data_parallel),
    )


def _meta(proxy: TensorProxy, kind: DistParallelType, group: ProcessGroup, *_: Any) -> TensorProxy:
    if kind is DistParallelType.REPLICATED:
        return TensorProxy(like=proxy)
    rows, *rest = proxy.shape
    return TensorProxy(like=proxy, shape=(rows * group.size(), *rest))


_trained = Symbol("unshard", meta=_meta, id="thunder_memsave.unshard", is_prim=True)


def _grad_transform(
    proxy: TensorProxy,
    kind: DistParallelType,
    group: ProcessGroup,
    replicas: ProcessGroup | None,
    everyone: ProcessGroup,
    reduce_dtype: dtypes.dtype,
    accumulates: bool,
) -> TensorProxy:
    sharded = kind is DistParallelType.FULLY_SHARDED
    # A copy of what is replicated: an input that is an output has no gradient of its own.
    full = _gathered(proxy, group) if sharded else prims.shallow_copy(proxy)
    grad = clang.maybe_convert_to_dtype(prims.get_grad(full), reduce_dtype)
    if accumulates:
        grad = with_unreduced(grad, proxy.name)
    if sharded:
        grad = reduce_scatter(grad, group).wait()
        # What was scattered is nobody else's.
        grad = grad if replicas is None else all_reduce(grad, replicas, True).wait()
    else:
        grad = all_reduce(grad, everyone, False).wait()
    prims.put_grad(proxy, clang.maybe_convert_to_dtype(grad, proxy.dtype))
    return full


register_grad(_trained.id, _grad_transform)

# Of a symbol that needs no gradient, Thunder's transform takes the rule only where the symbol has this name.
_frozen = Symbol("synchronize", meta=_meta, id="thunder_memsave.unshard_frozen", is_prim=True)


def _without_gradient(proxy: TensorProxy, _: DistParallelType, group: ProcessGroup) -> TensorProxy:
    return _gathered(proxy, group)


register_grad(_frozen.id, _without_gradient)


def _gathered(proxy: TensorProxy, group: ProcessGroup) -> TensorProxy:
    return all_gather(proxy, group, dtypes.to_torch_dtype(proxy.dtype)).wait()
