"""The full value of a sharded or replicated parameter in a trace, and the reduction of its gradient."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from thunder_memsave import compat

compat.apply()

from thunder.core.proxies import DistParallelType, TensorProxy  # noqa: E402
from thunder.distributed import prims as dist_prims  # noqa: E402


def unshard(
    proxy: TensorProxy, group: ProcessGroup, kind: DistParallelType, *, training: bool
) -> TensorProxy:
    """The full value of a parameter, padding included; its gradient is the mean over the ranks, of this rank's rows."""
    if training:
        return dist_prims.synchronize(proxy, group, kind)
    # The gradient transform turns `synchronize` into this, and does not run without gradients.
    if kind is DistParallelType.REPLICATED:
        return proxy
    return dist_prims.all_gather(proxy, group, True).wait()
