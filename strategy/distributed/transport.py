"""Starts all-gathers and reduce-scatters along dim 0, and all-reduces, of one tensor or of several together.

Reductions give the sum over the ranks, or with `mean` the mean. nccl computes means itself, without another pass over
the numbers (`ncclAvg`); gloo has no means, so there what is received, or reduced in place, is divided before the sum.

Each start returns one `(handle, result)` per tensor; the result may be read after `handle.wait()`, which may be called
once per result. The caller need not keep the inputs: gloo's works hold them, and nccl's do until they are waited for
(`stashed_for_allocator_safety_` in torch's ProcessGroupNCCL.hpp; before it was the default, `record_stream` did that).

On the CPU a start also waits: gloo's ranks share the CPU with the computation to overlap. And several gathers are
joined here, not by torch: its gloo corrupts the heap if coalesced gathers end at the same time as another collective
(tests/compat/test_gloo_coalesced_gathers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_memsave.distributed.lost_ranks import NoticingHandle

# torch 2.13 renamed both, and warns about the old names, the only ones that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


AUTO_BUCKET_BYTES = 4 * 2**20
"""Joining pays if starting takes longer than sending. On 2 gloo ranks nine gathers of 256 B take 2.3 ms alone and
0.4 ms joined; a step of six blocks of 2.25 MiB waits 96 ms for its collectives with buckets of 1 MiB, 80 ms with 4 MiB
(`benchmarks/sharding.py`)."""


class Handle(Protocol):
    """A collective to wait for."""

    def wait(self) -> object:
        """Return when the result may be read."""


def start_all_gather(
    shards: Sequence[Tensor], group: dist.ProcessGroup
) -> list[tuple[Handle, Tensor]]:
    """Gather the rows of all ranks for each of `shards`, which have one dtype and device.

    Each result has its own storage, so that it can be freed alone.
    """
    whole = [s.new_empty((s.shape[0] * group.size(), *s.shape[1:])) for s in shards]
    outputs, inputs = list(map(_bytes, whole)), [_bytes(s.contiguous()) for s in shards]
    if len(shards) > 1 and whole[0].device.type == "cpu":
        handle: Handle = _gather_joined(outputs, inputs, group)
        return [(handle, w) for w in whole]
    if len(shards) == 1:
        work = all_gather_single(outputs[0], inputs[0], group, True)
    else:  # one launch of nccl, without copies
        work = group.allgather_into_tensor_coalesced(outputs, inputs)
    handle = _started(NoticingHandle(work, _named("all-gather", whole), group), whole[0])
    return [(handle, w) for w in whole]


def start_reduce_scatter(
    whole: Sequence[Tensor], group: dist.ProcessGroup, *, mean: bool = False
) -> list[tuple[Handle, Tensor]]:
    """Reduce each of `whole` over the ranks and keep this rank's rows; all have one dtype and device.

    On the CPU every element is summed from rank 0 to the last one, in a bucket or alone; gloo's own order depends on
    an element's place in the buffer, and it sends everything to everyone.
    """
    whole = [w.contiguous() for w in whole]
    shards = [w.new_empty((w.shape[0] // group.size(), *w.shape[1:])) for w in whole]
    name = _named("reduce-scatter", whole)
    if whole[0].device.type == "cpu":
        handle: Handle = _sum_parts(whole, shards, group, name, mean=mean)
    elif len(whole) == 1:
        work = reduce_scatter_single(shards[0], whole[0], _operation(mean), group, True)
        handle = NoticingHandle(work, name, group)
    else:
        options = dist.ReduceScatterOptions()
        options.reduceOp = _operation(mean)
        work = group.reduce_scatter_tensor_coalesced(shards, whole, options)
        handle = NoticingHandle(work, name, group)
    return [(handle, s) for s in shards]


def start_all_reduce(
    values: Sequence[Tensor], group: dist.ProcessGroup, *, mean: bool = False
) -> list[tuple[Handle, Tensor]]:
    """Reduce each of `values` over the ranks, in place; all have one dtype and device.

    On the CPU every element is summed from rank 0 to the last one, as in `start_reduce_scatter`.
    """
    name, on_cpu = _named("all-reduce", values), values[0].device.type == "cpu"
    if on_cpu and mean:
        torch._foreach_div_(list(values), float(group.size()))
    if on_cpu and (len(values) > 1 or group.size() > 2):
        handle: Handle = _sum_joined(values, group, name)
        return [(handle, v) for v in values]
    if len(values) == 1:
        operation = _operation(mean and not on_cpu)
        work = dist.all_reduce(values[0], operation, group, async_op=True)
        assert work is not None
    else:  # one launch of nccl, without copies
        reduced = [torch.view_as_real(v) if v.is_complex() else v for v in values]
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = _operation(mean)
        work = group.allreduce_coalesced(reduced, options)
    handle = _started(NoticingHandle(work, name, group), values[0])
    return [(handle, v) for v in values]


def largest_of_ranks(values: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the largest of all ranks' numbers for each of `values`, of one dtype and shape `[1]`: in one collective.

    It may be read at once: on CUDA what reads it runs later on the same stream.
    """
    joined = torch.cat(list(values))
    work = dist.all_reduce(joined, dist.ReduceOp.MAX, group, async_op=True)
    assert work is not None
    NoticingHandle(work, f"all-reduce of {len(joined)} largest magnitudes", group).wait()
    return joined


def _operation(mean: bool) -> dist.ReduceOp:
    operation: Any = dist.ReduceOp.AVG if mean else dist.ReduceOp.SUM
    return cast(dist.ReduceOp, operation)


class _Ended:
    """Handle of an ended collective; torch's would keep the buffers alive as long as the trace holds it."""

    def wait(self) -> None:
        """Return at once."""


def _started(handle: Handle, tensor: Tensor) -> Handle:
    """Let the collective overlap with what follows; on the CPU, wait for it."""
    if tensor.device.type == "cpu":
        handle.wait()
        return _Ended()
    return handle


def _sum_joined(values: Sequence[Tensor], group: dist.ProcessGroup, name: str) -> Handle:
    """Sum values in one collective over a flat copy of them."""
    flat = torch.cat([v.reshape(-1) for v in values])
    handle, sums = _sum_flat(flat, group, name)
    for v, total in zip(values, sums.split([v.numel() for v in values]), strict=True):
        v.copy_(total.view(v.shape))
    return handle


def _sum_flat(flat: Tensor, group: dist.ProcessGroup, name: str) -> tuple[Handle, Tensor]:
    # Two numbers have the same sum in either order, and gloo's own all-reduce is faster.
    if group.size() <= 2:
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return _started(NoticingHandle(work, name, group), flat), flat
    sums = nn.functional.pad(flat, (0, -flat.numel() % group.size()))
    part = sums.new_empty(sums.numel() // group.size())
    _sum_parts([sums], [part], group, name, mean=False)
    gathered = NoticingHandle(all_gather_single(sums, part, group, True), name, group)
    return _started(gathered, sums), sums[: flat.numel()]


def _gather_joined(
    whole: Sequence[Tensor], shards: Sequence[Tensor], group: dist.ProcessGroup
) -> Handle:
    """Gather in one collective over a flat copy of the rows."""
    sent = torch.cat([s.view(-1) for s in shards])
    received = sent.new_empty((group.size(), sent.numel()))
    work = all_gather_single(received.view(-1), sent, group, True)
    handle = _started(NoticingHandle(work, _named("all-gather", whole), group), sent)
    parts = received.split([s.numel() for s in shards], dim=1)
    for w, part in zip(whole, parts, strict=True):
        w.view(group.size(), -1).copy_(part)
    return handle


def _sum_parts(
    whole: Sequence[Tensor],
    shards: Sequence[Tensor],
    group: dist.ProcessGroup,
    name: str,
    *,
    mean: bool,
) -> Handle:
    """Exchange rows all-to-all, and sum the received ones in the order of ranks."""
    by_rank = [w.view(group.size(), -1) for w in whole]
    sent = by_rank[0] if len(whole) == 1 else torch.cat(by_rank, dim=1)
    received = torch.empty_like(sent)
    # gloo takes bytes of any type; it asks for flat tensors.
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    handle = _started(NoticingHandle(work, name, group), sent)
    if mean:
        received.div_(float(group.size()))  # before the sum, which could overflow in float16
    parts = received.split([s.numel() for s in shards], dim=1)
    for shard, (first, *others) in zip(shards, parts, strict=True):
        shard.view(-1).copy_(first)
        for other in others:
            shard.view(-1).add_(other)
    return handle


def _named(kind: str, whole: Sequence[Tensor]) -> str:
    """Return the collective's name for messages, with the shapes that it communicates."""
    more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
    return f"{kind} of {', '.join(str(list(w.shape)) for w in whole[:3])}{more}"


def _bytes(t: Tensor) -> Tensor:
    """View one-byte dtypes as bytes: gloo does not support float8."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t
