"""What collectives of an executed trace allocate and send, without running them.

Follows `collectives.py` and `transport.py`, line by line. Where a collective is under way it holds more than its
result: copies that it sends, and on the CPU what is received before it is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from thunder_memsave import compat

compat.apply()

from thunder.core.proxies import FutureTensorProxy, TensorProxy  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402

from thunder_memsave.accumulation import with_unreduced  # noqa: E402
from thunder_memsave.collectives import (  # noqa: E402
    all_gather_bucket,
    cast_and_all_gather,
    is_wait,
    reduce_scatter_bucket,
)
from thunder_memsave.op_profile import Layout, OpProfile, Value, contiguous  # noqa: E402

_Allocated = Callable[[int, str], int]


class CollectiveRules:
    """The rule of every symbol that communicates, or waits for what does."""

    def __init__(self, allocated: _Allocated) -> None:
        """`allocated(nbytes, device type)`: what the allocator counts."""
        self._allocated = allocated

    def __call__(self, bsym: BoundSymbol, arguments: Sequence[Value]) -> OpProfile | None:
        """The profile of a collective; None for any other symbol."""
        if is_wait(bsym) or bsym.sym.id == with_unreduced.id:
            return _same_storage(bsym, arguments)
        group = _group(bsym)
        if group is None:
            return None
        name = bsym.sym.name
        if name in ("all_gather_rows", cast_and_all_gather.name, all_gather_bucket.name):
            return self._all_gather(bsym, arguments, group)
        if name in ("reduce_scatter_rows", reduce_scatter_bucket.name):
            return self._reduce_scatter(bsym, arguments, group)
        if name == "all_reduce_values":
            return self._all_reduce(bsym, arguments, group)
        return self._new_results(bsym, arguments, sent_bytes=_bytes(bsym.flat_proxy_outs))

    def _all_gather(
        self, bsym: BoundSymbol, arguments: Sequence[Value], group: dist.ProcessGroup
    ) -> OpProfile:
        whole = bsym.flat_proxy_outs
        sent = [_part(contiguous(w), group) for w in whole]
        pairs = list(zip(sent, arguments, strict=True))
        copied = sum(self._bytes(s) for s, a in pairs if _is_copied(a.layout, s))
        joined = 0
        if len(whole) > 1 and sent[0].device == "cpu":
            # gloo: one flat buffer for what goes out, one for what comes in.
            joined = sum(map(self._bytes, sent)) * (1 + group.size())
        return self._new_results(
            bsym,
            arguments,
            sent_bytes=_received(_bytes(whole), group),
            held_bytes=copied,
            inside_bytes=joined,
        )

    def _reduce_scatter(
        self, bsym: BoundSymbol, arguments: Sequence[Value], group: dist.ProcessGroup
    ) -> OpProfile:
        layouts = [a.layout for a in arguments]
        whole_bytes = [_nbytes(w) for w in layouts]
        held = sum(
            self._allocated(n, w.device.partition(":")[0])
            for n, w in zip(whole_bytes, layouts, strict=True)
            if not _is_contiguous(w)
        )
        if layouts[0].device == "cpu":
            # Every rank sends each other rank its rows, and adds up what it gets.
            received = self._allocated(sum(whole_bytes), "cpu")
            held += received if len(layouts) == 1 else 2 * received
        return self._new_results(
            bsym, arguments, sent_bytes=_received(sum(whole_bytes), group), held_bytes=held
        )

    def _all_reduce(
        self, bsym: BoundSymbol, arguments: Sequence[Value], group: dist.ProcessGroup
    ) -> OpProfile:
        sent_bytes = 2 * _received(_nbytes(arguments[0].layout), group)
        if bsym.args[-1] is True:  # skip_clone: the values are overwritten
            return _same_storage(bsym, arguments, sent_bytes=sent_bytes, written=frozenset({0}))
        return self._new_results(bsym, arguments, sent_bytes=sent_bytes)

    def _new_results(
        self,
        bsym: BoundSymbol,
        arguments: Sequence[Value],
        *,
        sent_bytes: int,
        held_bytes: int = 0,
        inside_bytes: int = 0,
    ) -> OpProfile:
        """Every tensor that comes out is new."""
        num_arguments = len({a.storage for a in arguments})
        layouts = [contiguous(o) for o in bsym.flat_proxy_outs if _is_tensor(o)]
        made = tuple(map(self._bytes, layouts))
        return OpProfile(
            results=tuple(Value(v, num_arguments + i) for i, v in enumerate(layouts)),
            num_argument_storages=num_arguments,
            made_bytes=made,
            held_bytes=held_bytes,
            # The handle that they share knows all of them.
            holds_results=len(layouts) > 1,
            peak_bytes=sum(made) + held_bytes + inside_bytes,
            moved_bytes=sum(_nbytes(a.layout) for a in arguments) + sum(map(_nbytes, layouts)),
            sent_bytes=sent_bytes,
            is_collective=True,
            dtype=_dtype(layouts),
        )

    def _bytes(self, layout: Layout) -> int:
        return self._allocated(layout.storage_bytes, layout.device.partition(":")[0])


def _same_storage(
    bsym: BoundSymbol,
    arguments: Sequence[Value],
    *,
    sent_bytes: int = 0,
    written: frozenset[int] = frozenset(),
) -> OpProfile:
    return OpProfile(
        results=tuple(Value(arguments[0].layout, 0) for _ in bsym.flat_proxy_outs),
        num_argument_storages=1,
        made_bytes=(),
        sent_bytes=sent_bytes,
        is_collective=True,
        written=written,
        dtype=_dtype([arguments[0].layout]),
    )


def _group(bsym: BoundSymbol) -> dist.ProcessGroup | None:
    leaves = tree_leaves((bsym.args, bsym.kwargs))
    return next((leaf for leaf in leaves if isinstance(leaf, dist.ProcessGroup)), None)


def _is_tensor(proxy: Any) -> bool:
    return isinstance(proxy, TensorProxy | FutureTensorProxy)


def _part(whole: Layout, group: dist.ProcessGroup) -> Layout:
    """One rank's rows."""
    rows, *rest = whole.shape
    shape = (rows // group.size(), *rest)
    return whole._replace(shape=shape, storage_bytes=whole.storage_bytes // group.size())


def _is_copied(given: Layout, sent: Layout) -> bool:
    return given.dtype != sent.dtype or not _is_contiguous(given)


def _is_contiguous(layout: Layout) -> bool:
    # A fake tensor would know, and costs more than this.
    size = 1
    for length, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def _received(nbytes: int, group: dist.ProcessGroup) -> int:
    """Of `nbytes` that all ranks share evenly, what the others have."""
    return nbytes * (group.size() - 1) // group.size()


def _nbytes(layout: Layout) -> int:
    return int(torch.Size(layout.shape).numel()) * layout.dtype.itemsize


def _bytes(proxies: Sequence[Any]) -> int:
    return sum(_nbytes(contiguous(p)) for p in proxies if _is_tensor(p))


def _dtype(layouts: Sequence[Layout]) -> str:
    return str(layouts[0].dtype).removeprefix("torch.") if layouts else ""
