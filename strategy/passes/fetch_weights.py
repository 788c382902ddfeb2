"""Fetch: frozen weights that are on the host are copied to the device before they are first read.

Before, with `w` on the host:

    t1 = aten_mm(x, w)

After:

    w_coming = fetch_weight(w, "cuda:0")
    w_here = torch_wait_prim_impl(w_coming)
    t1 = aten_mm(x, w_here)

A fetch is to the passes that follow what a gather is in ZeRO-3: `regather` gives forward and backward one each, and
`schedule` begins it early, beside what computes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from thunder.core import devices, prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, tracectx
from thunder.executors.torchex import wait_prim_impl

from thunder_memsave.errors import CompileError
from thunder_memsave.ops.host_copies.weights import fetch_weight
from thunder_memsave.passes.symbols import emptied, renamed, written_in_place


def fetch_weights(trace: TraceCtx, names: Collection[str]) -> TraceCtx:
    """Read copies of weights on the device in place of the weights.

    Args:
        trace: A joint or an inference trace, with operations claimed by executors.
        names: Of the arguments that are on the host. Their proxies have the device that they are copied to.

    Returns:
        A trace that makes a copy of each weight before it is first read; the same one if it reads none.

    Raises:
        CompileError: forward writes to one.
    """
    weights = {a.name: a for a in trace.args if a.name in names}
    if not weights:
        return trace
    for bsym in trace.bound_symbols:
        if (written := written_in_place(bsym)) in weights:
            raise CompileError(
                f"The forward changes {written!r} in place, which memory.offload_weights keeps on the host, so the "
                "change would be lost. Leave its module out of memory.offload_weights."
            )
    new = emptied(trace)
    with tracectx(new):
        new.bound_symbols = list(_rewritten(trace.bound_symbols, weights))
    new.set_provenance(TraceProvenance("Joint pass fetch_weights"))
    return new


def _rewritten(
    symbols: Sequence[BoundSymbol], weights: Mapping[str, TensorProxy]
) -> Iterator[BoundSymbol]:
    here: dict[str, Proxy] = {}
    for bsym in symbols:
        # The caller gets its arguments back, and they are unpacked, as they are.
        if bsym.sym is prims.python_return or bsym.sym.id is PrimIDs.UNPACK_TRIVIAL:
            yield bsym
            continue
        read = [a.name for a in bsym.flat_proxy_args if a.name in weights]
        for name in dict.fromkeys(read):
            if name not in here:
                fetched = _fetched(weights[name])
                yield from fetched
                here[name] = fetched[-1].output
        yield renamed(bsym, here, skip_output=True) if read else bsym


def _fetched(weight: TensorProxy) -> tuple[BoundSymbol, BoundSymbol]:
    """Return the fetch of a weight, and the wait for it."""
    like = {"shape": weight.shape, "dtype": weight.dtype, "device": weight.device}
    coming = FutureTensorProxy(f"{weight.name}_coming", **like)
    arrived = TensorProxy(f"{weight.name}_here", requires_grad=False, **like)
    place = str(devices.to_torch_device(weight.device))
    return fetch_weight.bind(weight, place, output=coming), wait_prim_impl.bind(
        coming, output=arrived
    )
