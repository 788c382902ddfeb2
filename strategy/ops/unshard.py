"""Gathers a sharded or replicated parameter in a trace, and reduces its gradient."""

from __future__ import annotations

from typing import Any

from thunder import clang
from thunder.core import dtypes, prims
from thunder.core.proxies import DistParallelType, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import register_grad
from thunder.distributed import prims as dist_prims
from torch.distributed import ProcessGroup

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.ops.accumulation import with_unreduced

_MEAN = dist_prims.DistributedReduceOps.AVG


def unshard(
    proxy: TensorProxy, data_parallel: DataParallel, kind: DistParallelType, *, training: bool
) -> TensorProxy:
    """Return the whole parameter, padding included.

    If it is trained, its gradient is this rank's rows of the mean over all ranks, computed in
    `data_parallel.reduce_dtype`: first within the group, then across the replicas if there are several.
    """
    if training and proxy.requires_grad:
        return _trained(proxy, kind, *_reduction(proxy, data_parallel))
    if training:
        # Unlike a bare gather, Thunder's gradient transform takes these where nothing needs a gradient.
        if proxy.dtype == dtypes.float8_e4m3fn:
            assert kind is DistParallelType.FULLY_SHARDED, "what is replicated is read as it is"
            return _in_fp8(proxy, kind, data_parallel.group)
        return dist_prims.synchronize(proxy, data_parallel.group, kind)
    if kind is DistParallelType.REPLICATED:
        return proxy
    return _gathered(proxy, data_parallel.group)


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
        data_parallel.accumulate == "accumulate_unsharded",
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
        grad = _reduce_scatter(grad, group)
        grad = grad if replicas is None else _all_reduce(grad, replicas, owned=True)
    else:
        grad = _all_reduce(grad, everyone, owned=False)
    prims.put_grad(proxy, clang.maybe_convert_to_dtype(grad, proxy.dtype))
    return full


register_grad(_trained.id, _grad_transform)

# Thunder's own wants to average a gradient, which fp8 numbers do not have. Of a symbol that needs no gradient its
# transform takes the rule only where the symbol has this name.
_in_fp8 = Symbol("synchronize", meta=_meta, id="thunder_memsave.unshard_fp8", is_prim=True)


def _without_gradient(proxy: TensorProxy, _: DistParallelType, group: ProcessGroup) -> TensorProxy:
    return _gathered(proxy, group)


register_grad(_in_fp8.id, _without_gradient)


def _gathered(proxy: TensorProxy, group: ProcessGroup) -> TensorProxy:
    return dist_prims.all_gather(proxy, group, True).wait()


def _reduce_scatter(grad: TensorProxy, group: ProcessGroup) -> TensorProxy:
    return dist_prims.reduce_scatter(grad, _MEAN, group, True).wait()


def _all_reduce(grad: TensorProxy, group: ProcessGroup, *, owned: bool) -> TensorProxy:
    """Average `grad` over the group; `owned`: it may be overwritten, so it is not copied."""
    return dist_prims.all_reduce(grad, _MEAN, group, True, owned).wait()
