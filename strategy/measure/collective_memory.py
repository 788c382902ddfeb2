"""Computes the bytes that collectives of an executed trace allocate and send, without running them.

Follows `ops/families/collectives.py` and `distributed/transport.py`, line by line. On the CPU a collective ends where
it starts, and allocates inside, besides its results: copies to send, received bytes before they are summed or sorted,
and gloo's own buffers. On CUDA it holds the bytes that it sends, copies or its arguments, until the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from torch.utils._pytree import tree_leaves

from thunder_memsave.aten.record import storage_id
from thunder_memsave.measure.layouts import Layout, Value, contiguous, is_contiguous
from thunder_memsave.measure.op_profile import OpProfile
from thunder_memsave.ops.accumulation import with_unreduced
from thunder_memsave.ops.families.collectives import (
    all_gather,
    all_gather_bucket,
    all_reduce,
    all_reduce_bucket,
    is_wait,
    reduce_scatter,
    reduce_scatter_bucket,
)

_Allocated = Callable[[int, str], int]


class CollectiveRules:
    """Gives the profiles of collectives and of waits for them."""

    def __init__(self, allocated: _Allocated, *, device_type: str = "") -> None:
        """Store the allocator and the planned device.

        Args:
            allocated: Maps `(nbytes, device type)` to the bytes that the allocator counts.
            device_type: Type of the planned device, if the trace's tensors are on another one, such as meta.
        """
        self._allocated, self._device_type = allocated, device_type

    def __call__(self, bsym: BoundSymbol, arguments: Sequence[Value]) -> OpProfile | None:
        """Return the profile of a collective or a wait; None for any other symbol."""
        if is_wait(bsym) or bsym.sym.id == with_unreduced.id:
            return _in_place(arguments[:1])
        group = _group(bsym)
        if group is None:
            return None
        if bsym.sym in (all_gather, all_gather_bucket):
            return self._all_gather(bsym, arguments, group)
        if bsym.sym in (reduce_scatter, reduce_scatter_bucket):
            return self._reduce_scatter(bsym, arguments, group)
        if bsym.sym in (all_reduce, all_reduce_bucket):
            return self._all_reduce(bsym, arguments, group)
        layouts = _results(bsym)
        return self._new_results(layouts, arguments, sent_bytes=sum(map(_nbytes, layouts)))

    def _all_gather(
        self, bsym: BoundSymbol, arguments: Sequence[Value], group: dist.ProcessGroup
    ) -> OpProfile:
        whole = _results(bsym)
        sent = [_part(w, group) for w in whole]
        cast = contiguous_copy = held = 0
        for given, part in zip((a.layout for a in arguments), sent, strict=True):
            is_cast = given.dtype != part.dtype
            is_copied = not is_contiguous(_cloned(given) if is_cast else given)
            cast += self._bytes(part) * is_cast
            contiguous_copy += self._bytes(part) * is_copied
            held += self._bytes(part) * (is_cast or is_copied)
        inside_bytes, holds = cast + contiguous_copy, self._holds(bsym, whole[0])
        if self._is_on_cpu(whole[0]):
            inside_bytes += self._gloo_gather(whole, sent)
        return self._new_results(
            whole,
            arguments,
            sent_bytes=_received(sum(map(_nbytes, whole)), group),
            held_bytes=held if holds else 0,
            held=_sent_as_they_are(arguments, sent) if holds else frozenset(),
            inside_bytes=inside_bytes,
        )

    def _gloo_gather(self, whole: Sequence[Layout], sent: Sequence[Layout]) -> int:
        """Return gloo's bytes for an all-gather: a receive buffer; several tensors are sent and received as one."""
        received = self._cpu_bytes(whole)
        return received if len(whole) == 1 else self._cpu_bytes(sent) + 2 * received

    def _reduce_scatter(
        self, bsym: BoundSymbol, arguments: Sequence[Value], group: dist.ProcessGroup
    ) -> OpProfile:
        given = [a.layout for a in arguments]
        whole = [_packed(v) for v in given]
        copied = sum(
            self._bytes(w) for w, v in zip(whole, given, strict=True) if not is_contiguous(v)
        )
        inside_bytes, holds = copied, self._holds(bsym, given[0])
        if self._is_on_cpu(given[0]):
            # Every rank sends each other rank its rows, several tensors as one, and sums the rows that it receives.
            inside_bytes += self._cpu_bytes(whole) * (1 if len(whole) == 1 else 2)
            inside_bytes += self._divisor_bytes(given[0].dtype)
        return self._new_results(
            _results(bsym),
            arguments,
            sent_bytes=_received(sum(map(_nbytes, whole)), group),
            held_bytes=copied if holds else 0,
            held=_sent_as_they_are(arguments, whole) if holds else frozenset(),
            inside_bytes=inside_bytes,
        )

    def _all_reduce(
        self, bsym: BoundSymbol, arguments: Sequence[Value], group: dist.ProcessGroup
    ) -> OpProfile:
        given = [a.layout for a in arguments]
        *_, is_in_place = bsym.args
        values = given if is_in_place else list(map(_cloned, given))
        inside_bytes = 0
        if self._is_on_cpu(given[0]):
            inside_bytes = max(self._gloo_sum(values, group), self._divisor_bytes(given[0].dtype))
        sent_bytes = 2 * _received(sum(map(_nbytes, given)), group)
        if is_in_place:
            return _in_place(arguments, sent_bytes=sent_bytes, peak_bytes=inside_bytes, writes=True)
        return self._new_results(
            values, arguments, sent_bytes=sent_bytes, inside_bytes=inside_bytes
        )

    def _gloo_sum(self, values: Sequence[Layout], group: dist.ProcessGroup) -> int:
        """Return gloo's bytes for an all-reduce: several tensors are one; over two ranks it reduces, then gathers."""
        if len(values) == 1 and group.size() <= 2:
            return 0
        whole = list(map(_packed, values))
        flat_bytes = self._cpu_bytes(whole)
        reshaped = sum(
            self._bytes(w) for w, v in zip(whole, values, strict=True) if not _is_flat_by_a_view(v)
        )
        if group.size() <= 2:
            return flat_bytes + reshaped
        itemsize, num_ranks = values[0].dtype.itemsize, group.size()
        part_bytes = -(-flat_bytes // (itemsize * num_ranks)) * itemsize
        # The padded copy, and as much for the result: first of all_to_all, then of the all-gather.
        return flat_bytes + max(reshaped, 2 * part_bytes * num_ranks + part_bytes)

    def _divisor_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of what a mean is divided by: PyTorch makes a float64 tensor of it, and casts that."""
        cast_bytes = 0 if dtype is torch.float64 else self._allocated(dtype.itemsize, "cpu")
        return self._allocated(torch.float64.itemsize, "cpu") + cast_bytes

    def _new_results(
        self,
        layouts: Sequence[Layout],
        arguments: Sequence[Value],
        *,
        sent_bytes: int,
        held_bytes: int = 0,
        held: frozenset[int] = frozenset(),
        inside_bytes: int = 0,
    ) -> OpProfile:
        """Return a profile whose results are all new; `inside_bytes` is the peak besides them, with `held_bytes`."""
        num_arguments = len({a.storage for a in arguments})
        made = tuple(map(self._bytes, layouts))
        return OpProfile(
            results=tuple(Value(v, num_arguments + i) for i, v in enumerate(layouts)),
            num_argument_storages=num_arguments,
            made_bytes=made,
            held_bytes=held_bytes,
            held=held,
            peak_bytes=sum(made) + inside_bytes,
            moved_bytes=sum(_nbytes(a.layout) for a in arguments) + sum(map(_nbytes, layouts)),
            sent_bytes=sent_bytes,
            is_collective=True,
            dtype=_dtype(layouts),
        )

    def _holds(self, bsym: BoundSymbol, layout: Layout) -> bool:
        """Tell whether the bytes to send are held until the wait (`distributed/transport.py`)."""
        return _is_under_way(bsym) and not self._is_on_cpu(layout)

    def _is_on_cpu(self, layout: Layout) -> bool:
        return (self._device_type or layout.device.partition(":")[0]) == "cpu"

    def _bytes(self, layout: Layout) -> int:
        return self._allocated(layout.storage_bytes, layout.device.partition(":")[0])

    def _cpu_bytes(self, layouts: Sequence[Layout]) -> int:
        """Return the bytes of all layouts in one CPU buffer."""
        return self._allocated(sum(map(_nbytes, layouts)), "cpu")


def _sent_as_they_are(arguments: Sequence[Value], sent: Sequence[Layout]) -> frozenset[int]:
    """Return the storages of arguments that are sent without a cast or a copy."""
    pairs = zip(arguments, sent, strict=True)
    return frozenset(
        a.storage for a, s in pairs if a.layout.dtype == s.dtype and is_contiguous(a.layout)
    )


def _in_place(
    arguments: Sequence[Value], *, sent_bytes: int = 0, peak_bytes: int = 0, writes: bool = False
) -> OpProfile:
    """Return a profile whose results are in their arguments' memory."""
    storages = frozenset(a.storage for a in arguments)
    return OpProfile(
        results=tuple(arguments),
        num_argument_storages=len(storages),
        made_bytes=(),
        peak_bytes=peak_bytes,
        sent_bytes=sent_bytes,
        is_collective=True,
        written=storages if writes else frozenset(),
        dtype=_dtype([a.layout for a in arguments]),
    )


def _results(bsym: BoundSymbol) -> list[Layout]:
    return [contiguous(o) for o in bsym.flat_proxy_outs if _is_tensor(o)]


def _is_under_way(bsym: BoundSymbol) -> bool:
    return any(isinstance(o, FutureTensorProxy) for o in bsym.flat_proxy_outs)


def _group(bsym: BoundSymbol) -> dist.ProcessGroup | None:
    leaves = tree_leaves((bsym.args, bsym.kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, dist.ProcessGroup)), None)


def _is_tensor(proxy: Any) -> bool:
    return isinstance(proxy, TensorProxy | FutureTensorProxy)


def _part(whole: Layout, group: dist.ProcessGroup) -> Layout:
    """Return the layout of one rank's shard."""
    rows, *rest = whole.shape
    shape = (rows // group.size(), *rest)
    return whole._replace(shape=shape, storage_bytes=whole.storage_bytes // group.size())


def _packed(layout: Layout) -> Layout:
    """Return the layout of a contiguous copy."""
    stride = torch.empty(layout.shape, device="meta").stride()
    return layout._replace(stride=stride, offset=0, storage_bytes=_nbytes(layout))


def _cloned(layout: Layout) -> Layout:
    """Return the layout that `clone` gives: with the original's strides, if that has no gaps."""
    original = torch.empty_strided(layout.shape, layout.stride, device="meta")
    return _packed(layout)._replace(stride=original.clone().stride())


def _is_flat_by_a_view(layout: Layout) -> bool:
    original = torch.empty_strided(layout.shape, layout.stride, device="meta")
    return storage_id(original.reshape(-1)) == storage_id(original)


def _received(nbytes: int, group: dist.ProcessGroup) -> int:
    """Return the bytes that the other ranks have, of `nbytes` that are sharded evenly."""
    return nbytes * (group.size() - 1) // group.size()


def _nbytes(layout: Layout) -> int:
    return int(torch.Size(layout.shape).numel()) * layout.dtype.itemsize


def _dtype(layouts: Sequence[Layout]) -> str:
    return str(layouts[0].dtype).removeprefix("torch.") if layouts else ""
