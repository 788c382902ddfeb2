"""Gather in the compute dtype: a weight that is read only after a cast to a smaller dtype is cast before the gather.

Under `bf16-mixed` this halves the bytes sent and the bytes of a gathered weight. Before:

    ft1 = all_gather_rows(w, group, torch.float32)
    t2 = torch_wait_prim_impl(ft1)                  # f32, whole
    t3 = Tensor.to(t2, torch.bfloat16)
    t4 = torch.nn.functional.linear(x, t3, None)

After:

    ft1 = all_gather_rows(w, group, torch.bfloat16)
    t3 = torch_wait_prim_impl(ft1)                  # bf16, whole
    t4 = torch.nn.functional.linear(x, t3, None)

A cast is elementwise, so every value stays bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import dce

from thunder_memsave.ops.families.collectives import all_gather, is_all_gather, is_wait
from thunder_memsave.passes.symbols import is_cast


def gather_in_compute_dtype(trace: TraceCtx) -> TraceCtx:
    """Cast shards instead of whole weights, where a cast makes them smaller.

    Args:
        trace: A joint or an inference trace, with operations claimed by executors.

    Returns:
        A trace with the same values; a weight that is read in two dtypes is gathered in both.
    """
    producers = {o.name: b for b in trace.bound_symbols for o in b.flat_proxy_outs}
    chains = {
        id(bsym): chain
        for bsym in trace.bound_symbols
        if _shrinks(bsym) and (chain := chain_of_gather(bsym.flat_proxy_args[0], producers))
    }
    if not chains:
        return trace
    new = from_trace(trace)
    with tracectx(new):
        for bsym in trace.bound_symbols:
            if id(bsym) not in chains:
                new.bound_symbols.append(bsym)
                continue
            chain = chains[id(bsym)]
            new.bound_symbols += gathered_as(chain, chain[0].args[0], bsym.output)
    new = dce(new)
    new.set_provenance(TraceProvenance("Joint pass gather_in_compute_dtype"))
    return new


def _shrinks(bsym: BoundSymbol) -> bool:
    """Return whether this is a cast to fewer bytes per element."""
    if not is_cast(bsym):
        return False
    (before,), (after,) = bsym.flat_proxy_args, bsym.flat_proxy_outs
    return isinstance(before, TensorProxy) and after.dtype.bytes < before.dtype.bytes


def chain_of_gather(value: Proxy, producers: Mapping[str, BoundSymbol]) -> Sequence[BoundSymbol]:
    """Return the gather, the wait and any slice of padding rows that make this value; empty if none do.

    Args:
        value: Of the trace.
        producers: The symbols of the trace by the names of their results.
    """
    chain: list[BoundSymbol] = []
    while (producer := producers.get(value.name)) is not None and len(chain) < 3:
        chain.insert(0, producer)
        if is_all_gather(producer):
            return chain
        if not (is_wait(producer) or "slice" in producer.sym.name):
            return ()
        value = producer.flat_proxy_args[0]
    return ()


def gathered_as(
    chain: Sequence[BoundSymbol], shard: Proxy, result: TensorProxy
) -> Iterator[BoundSymbol]:
    """Yield a chain of `chain_of_gather` for another shard, with the dtype of `result`, which it makes."""
    gather, *rest = chain
    dtype = result.dtype
    swaps: dict[Any, Proxy] = {}
    for bsym in chain:
        (output,) = bsym.flat_proxy_outs
        named = output.replace(name=f"{output.name}_{result.name}", dtype=dtype)
        swaps[variableify(output)] = result if bsym is chain[-1] else named
    group = gather.args[1]
    future = swaps[variableify(gather.output)]
    yield all_gather.bind(shard, group, to_torch_dtype(dtype), output=future)
    yield from (bsym.from_bsym_swap_proxies(swaps) for bsym in rest)
