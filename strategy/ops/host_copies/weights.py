"""Frozen weights that stay on the host, and the operation of a trace that copies one to the device.

    f1 = fetch_weight(w, "cuda:0")          # begins a copy, as a gather begins to receive
    w1 = torch_wait_prim_impl(f1)           # the copy has ended

A weight on the host is the same parameter, whose data is in page-locked memory: state dicts, files and casts read it
there. The host's memory is not torch's, so no allocator counts it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from thunder.core import devices
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.extend import OperatorExecutor, register_executor
from torch import Tensor, nn

from thunder_memsave.ops.host_copies.buffers import bytes_of, is_dense
from thunder_memsave.ops.host_copies.engine import begin, host_of, wait
from thunder_memsave.planner.graph import FETCH

_PLACE, _ADDRESS, _COPY = "fetched_to", "address_on_host", "copied_from_host"

_executor = OperatorExecutor("thunder_memsave_host_weights", version="0")
register_executor(_executor)


def mark(p: nn.Parameter, place: torch.device) -> None:
    """Say that a weight is to stay on the host, for use on the device `place`."""
    setattr(p, _PLACE, place)


def unmark(p: nn.Parameter) -> None:
    """Forget that a weight was to stay on the host, unless it is there."""
    if not _is_there(p):
        vars(p).pop(_PLACE, None)


def take_back(p: nn.Parameter) -> None:
    """Put a weight that is on the host on its device again, in place."""
    place = vars(p).pop(_PLACE)
    vars(p).pop(_ADDRESS, None)
    p.data = p.data.to(place, copy=True)


def keep_on_host(p: nn.Parameter, place: torch.device) -> None:
    """Put a weight's data into memory of the host, in place, for use on the device `place`.

    Raises:
        HostMemoryError: the host does not let the device read so much of its memory.
    """
    mark(p, place)
    values = p.data  # a plain tensor: a sharded weight's rows on this rank
    if values.untyped_storage().nbytes() and not _is_there(p):  # in a plan it has no memory
        lease = host_of(place).weights.take(values.nbytes)
        strides = (values if is_dense(values) else values.contiguous()).stride()
        kept = lease.view(values.dtype).as_strided(values.shape, strides)
        kept.copy_(values)
        p.data = kept
        setattr(p, _ADDRESS, kept.data_ptr())


def _is_there(p: nn.Parameter) -> bool:
    return bool(vars(p).get(_ADDRESS) == p.data.data_ptr())


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device that computes with a module's tensors, wherever the first is; the CPU if there are none."""
    return next((place_of(t) or t.device for t in tensors), torch.device("cpu"))


def place_of(tensor: Tensor) -> torch.device | None:
    """Return the device that a weight on the host is copied to; None: it is not on the host."""
    return vars(tensor).get(_PLACE)


def copy_here(p: nn.Parameter) -> Tensor:
    """Return a copy of a weight on the host, on the device that it is copied to; PyTorch's own, at once."""
    with torch.no_grad():
        copy = p.to(place_of(p), copy=True)
    vars(copy)[_COPY] = True
    return copy


def is_always_here(p: Tensor) -> bool:
    """Return whether a parameter is on the device between calls: it is neither on the host nor `copy_here`'s."""
    return place_of(p) is None and _COPY not in vars(p)


class _Arriving:
    """A copy to the device that has begun."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def wait(self) -> None:
        """Let what the device is given next wait for it."""
        wait(self._target)


def _fetch(weight: Tensor, place: str) -> tuple[_Arriving, Tensor]:
    if not is_dense(weight):  # it was exchanged by hand
        weight = weight.detach().contiguous()
    target = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=place)
    begin(bytes_of(weight), bytes_of(target), "in")
    return _Arriving(target), target


def _coming(weight: TensorProxy, place: str) -> FutureTensorProxy:
    return FutureTensorProxy(
        shape=weight.shape, dtype=weight.dtype, device=devices.to_device(place)
    )


fetch_weight = _executor.register_operator(FETCH, meta=_coming, fn=_fetch)
"""`(weight on the host, device) -> future` of a copy of it on the device; inside of `engine.copying()`."""


def is_fetch(bsym: BoundSymbol) -> bool:
    """Return whether a symbol copies a weight from the host."""
    return bool(bsym.sym.id == fetch_weight.id)


def fetches(trace: TraceCtx) -> bool:
    """Return whether a trace copies weights from the host."""
    return any(map(is_fetch, trace.bound_symbols))
