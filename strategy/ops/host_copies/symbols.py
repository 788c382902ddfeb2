"""The operations of a trace that copy a value to the host and back, as `planner/offload/copies.py` has them.

    h1 = copy_out(t1)                       # begins; t1's memory is held until the wait
    h1_done = wait_copy_out(h1)             # the copy has ended
    ...
    b1 = copy_in(h1_done, "cuda:0")         # allocates, and begins the copy back
    t1, t1_view = wait_copy_in(b1, (("float32", (4, 8), (8, 1), 0), ("float32", (8, 4), (1, 8), 0)))

A storage is copied whole, as bytes; what comes back are the tensors that forward had in it, by their layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor

from thunder_memsave.ops.host_copies.engine import begin, host_of, wait
from thunder_memsave.planner.offload.copies import COPY_IN, COPY_OUT, WAIT_IN, WAIT_OUT

LaidOut = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""Dtype, shape, strides and offset of a tensor in a storage; the last two in elements."""

_executor = OperatorExecutor("thunder_memsave_host_copies", version="0")
register_executor(_executor)


def bytes_proxy(name: str, nbytes: int, place: str) -> TensorProxy:
    """Make the proxy of a storage's bytes."""
    return TensorProxy(
        name,
        shape=(nbytes,),
        device=devices.to_device(place),
        dtype=dtypes.uint8,
        requires_grad=False,
    )


def _copy_out(value: Tensor) -> Tensor:
    source = _bytes_of(value)
    host = host_of(value.device).buffers.take(source.numel())
    begin(source, host, "out")
    return host


def _wait_copy_out(host: Tensor) -> Tensor:
    wait(host)
    return host


def _copy_in(host: Tensor, place: str) -> Tensor:
    target = torch.empty(host.numel(), dtype=torch.uint8, device=place)
    begin(host, target, "in")
    return target


def _wait_copy_in(target: Tensor, layouts: Sequence[LaidOut]) -> tuple[Tensor, ...]:
    wait(target)
    return tuple(_laid_out(target, *layout) for layout in layouts)


def _bytes_of(value: Tensor) -> Tensor:
    """Return all bytes of the storage that a tensor is in."""
    memory = value.untyped_storage()
    none = torch.empty(0, dtype=torch.uint8, device=value.device)
    return none.set_(memory, 0, (memory.nbytes(),), (1,))


def _laid_out(
    target: Tensor, dtype: str, shape: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    none = torch.empty(0, dtype=getattr(torch, dtype), device=target.device)
    return none.set_(target.untyped_storage(), offset, tuple(shape), tuple(stride))


def _refuse(*_: object) -> None:
    raise AssertionError("copies are bound with the proxies that they make")


copy_out = _executor.register_operator(COPY_OUT, meta=_refuse, fn=_copy_out)
wait_copy_out = _executor.register_operator(WAIT_OUT, meta=_refuse, fn=_wait_copy_out)
copy_in = _executor.register_operator(COPY_IN, meta=_refuse, fn=_copy_in)
wait_copy_in = _executor.register_operator(WAIT_IN, meta=_refuse, fn=_wait_copy_in)

_BEGINS = (copy_out.id, copy_in.id)
_WAITS = (wait_copy_out.id, wait_copy_in.id)


def begins_copy(bsym: BoundSymbol) -> bool:
    """Return whether a symbol begins a copy to or from the host."""
    return bsym.sym.id in _BEGINS


def waits_for_copy(bsym: BoundSymbol) -> bool:
    """Return whether a symbol waits for one."""
    return bsym.sym.id in _WAITS


def has_copies(trace: TraceCtx) -> bool:
    """Return whether a trace copies anything to or from the host."""
    return any(map(begins_copy, trace.bound_symbols))
