"""The full value of a sharded or replicated parameter in a trace, and the reduction of its gradient."""

from __future__ import annotations

from typing import Any

from torch.distributed import ProcessGroup

from thunder_memsave import compat

compat.apply()

from thunder import clang  # noqa: E402
from thunder.core import dtypes, prims  # noqa: E402
from thunder.core.proxies import DistParallelType, TensorProxy  # noqa: E402
from thunder.core.symbol import Symbol  # noqa: E402
from thunder.core.transforms import register_grad  # noqa: E402
from thunder.distributed import prims as dist_prims  # noqa: E402

from thunder_memsave.accumulation import with_unreduced  # noqa: E402
from thunder_memsave.sharding import DataParallel  # noqa: E402


def unshard(
    proxy: TensorProxy, data_parallel: DataParallel, kind: DistParallelType, *, training: bool
) -> TensorProxy:
    """The full value of a parameter, padding included.

    Where it is trained, its gradient is the mean over all ranks, of this rank's rows, summed over the ranks in
    `data_parallel.reduce_dtype`. It is reduced within the group, and with several replicas across them after that.
    """
    if training and proxy.requires_grad:
        return _trained(proxy, kind, *_reduction(proxy, data_parallel))
    if training:
        # Unlike a bare gather, Thunder's gradient transform takes it where nothing needs a gradient. Unlike its own
        # `synchronize`, which wants to average a gradient, it takes weights in fp8 too.
        return _frozen(proxy, kind, data_parallel.group)
    if kind is DistParallelType.REPLICATED:
        return proxy
    return _gathered(proxy, data_parallel.group)


def _reduction(proxy: TensorProxy, data_parallel: DataParallel) -> tuple[Any, ...]:
    """What `_gradient` is to do, as plain arguments of a symbol."""
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
    grad = grad / everyone.size()
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

# Of a symbol that needs no gradient Thunder takes the rule only where it has this name.
_frozen = Symbol("synchronize", meta=_meta, id="thunder_memsave.unshard_frozen", is_prim=True)


def _without_gradient(
    proxy: TensorProxy, kind: DistParallelType, group: ProcessGroup
) -> TensorProxy:
    return proxy if kind is DistParallelType.REPLICATED else _gathered(proxy, group)


register_grad(_frozen.id, _without_gradient)


def _gathered(proxy: TensorProxy, group: ProcessGroup) -> TensorProxy:
    return dist_prims.all_gather(proxy, group, True).wait()


def _reduce_scatter(grad: TensorProxy, group: ProcessGroup) -> TensorProxy:
    return dist_prims.reduce_scatter(grad, dist_prims.DistributedReduceOps.SUM, group, True).wait()


def _all_reduce(grad: TensorProxy, group: ProcessGroup, *, owned: bool) -> TensorProxy:
    """`owned`: the values may be overwritten, so nothing is copied."""
    return dist_prims.all_reduce(
        grad, dist_prims.DistributedReduceOps.SUM, group, True, owned
    ).wait()
