"""The memory of copies to and from the host, which are no operators that could run alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_memsave.measure.layouts import Layout, Value, contiguous
from thunder_memsave.measure.op_profile import OpProfile
from thunder_memsave.ops.host_copies.states import fetch_states, store_states, wait_states
from thunder_memsave.ops.host_copies.symbols import copy_in, copy_out, wait_copy_in, wait_copy_out
from thunder_memsave.ops.host_copies.weights import is_fetch
from thunder_memsave.planner.graph import FETCH


class HostCopyRules:
    """Gives the profiles of copies and of the waits for them."""

    def __init__(self, allocated: Callable[[int, str], int]) -> None:
        """`allocated` maps `(nbytes, device type)` to the bytes that the allocator counts."""
        self._allocated = allocated

    def __call__(self, bsym: BoundSymbol, arguments: Sequence[Value]) -> OpProfile | None:
        """Return the profile of a copy or a wait; None for any other symbol.

        A buffer of the host has no bytes here: those of the device are counted. A copy out holds what it reads until
        the wait, a copy back allocates when it begins.
        """
        if bsym.sym.id == copy_out.id:
            return self._out(bsym, arguments[0])
        if bsym.sym.id == copy_in.id:
            return self._in(bsym, arguments[0])
        if is_fetch(bsym):
            return self._fetch(bsym, arguments[0])
        if bsym.sym.id == fetch_states.id:
            return self._fetch_states(bsym)
        if bsym.sym.id == store_states.id:
            return self._out(bsym, arguments[0])
        if bsym.sym.id == wait_states.id:
            return OpProfile(results=(), num_argument_storages=1, made_bytes=())
        if bsym.sym.id == wait_copy_out.id:
            return _views(arguments[0], [arguments[0].layout])
        if bsym.sym.id == wait_copy_in.id:
            target = arguments[0].layout
            return _views(arguments[0], [_laid_out(target, *each) for each in bsym.args[1]])
        return None

    def _out(self, bsym: BoundSymbol, source: Value) -> OpProfile:
        return OpProfile(
            results=(Value(_of_result(bsym), 1),),
            num_argument_storages=1,
            made_bytes=(0,),
            held=frozenset((0,)),
            copied_bytes=source.layout.storage_bytes,
        )

    def _fetch(self, bsym: BoundSymbol, weight: Value) -> OpProfile:
        """What is copied is no memory of the device, so nothing is held."""
        copied = self._in(bsym, weight)
        nbytes = weight.layout.storage_bytes
        made = _of_result(bsym)._replace(stride=weight.layout.stride)
        return replace(
            copied,
            results=(Value(made, 1),),
            held=frozenset(),
            copied_bytes=nbytes,
            key=f"{FETCH} {nbytes}",
        )

    def _fetch_states(self, bsym: BoundSymbol) -> OpProfile:
        """What is allocated is the optimizer's, each state by itself; its sum is known."""
        nbytes = bsym.args[1]
        return OpProfile(
            results=(Value(_of_result(bsym), 0),),
            num_argument_storages=0,
            made_bytes=(nbytes,),
            peak_bytes=nbytes,
            copied_bytes=nbytes,
        )

    def _in(self, bsym: BoundSymbol, host: Value) -> OpProfile:
        layout = _of_result(bsym)
        nbytes = self._allocated(layout.storage_bytes, layout.device.partition(":")[0])
        return OpProfile(
            results=(Value(layout, 1),),
            num_argument_storages=1,
            made_bytes=(nbytes,),
            held=frozenset((0,)),
            peak_bytes=nbytes,
            copied_bytes=math.prod(host.layout.shape),
        )


def _of_result(bsym: BoundSymbol) -> Layout:
    (result,) = bsym.flat_proxy_outs
    assert isinstance(result, TensorProxy | FutureTensorProxy)
    return contiguous(result)


def _views(of: Value, layouts: Sequence[Layout]) -> OpProfile:
    results = tuple(Value(layout, 0) for layout in layouts)
    return OpProfile(results=results, num_argument_storages=1, made_bytes=())


def _laid_out(
    target: Layout, dtype: str, shape: Sequence[int], stride: Sequence[int], offset: int
) -> Layout:
    return target._replace(
        shape=tuple(shape), stride=tuple(stride), offset=offset, dtype=getattr(torch, dtype)
    )
