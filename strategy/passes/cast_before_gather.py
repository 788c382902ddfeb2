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

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

from thunder_memsave.ops.families.collectives import all_gather, is_all_gather, is_wait
from thunder_memsave.passes.drop_unread import drop_unread
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
    return with_casts_first(trace, chains, _cast_first, name="gather_in_compute_dtype")


def _cast_first(chain: Sequence[BoundSymbol], cast: BoundSymbol) -> Iterator[BoundSymbol]:
    """Yield the chain in the small dtype, to which the gather itself casts the shard."""
    return gathered_as(chain, chain[0].args[0], cast.output)


def with_casts_first(
    trace: TraceCtx,
    chains: Mapping[int, Sequence[BoundSymbol]],
    cast_first: Callable[[Sequence[BoundSymbol], BoundSymbol], Iterator[BoundSymbol]],
    *,
    name: str,
    before_all: Sequence[BoundSymbol] = (),
) -> TraceCtx:
    """Return the trace with other symbols in the place of casts of gathered weights; the same one if there are none.

    Args:
        trace: A joint or an inference trace.
        chains: By the id of each cast, the chain that leads to it (`chain_of_gather`).
        cast_first: Takes a chain and its cast, and yields what makes the cast's results.
        name: Of the pass.
        before_all: Symbols that compute something from shards, before all others that compute.
    """
    if not chains:
        return trace
    new = from_trace(trace)
    inputs = list(takewhile(lambda b: b.sym.name.startswith("unpack"), trace.bound_symbols))
    with tracectx(new):
        new.bound_symbols = [*inputs, *before_all]
        for bsym in trace.bound_symbols[len(inputs) :]:
            chain = chains.get(id(bsym))
            new.bound_symbols += [bsym] if chain is None else cast_first(chain, bsym)
    new = drop_unread(new)
    new.set_provenance(TraceProvenance(f"Joint pass {name}"))
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
    chain: Sequence[BoundSymbol], shard: TensorProxy, result: TensorProxy
) -> Iterator[BoundSymbol]:
    """Yield a chain of `chain_of_gather` for another shard, with the dtype of `result`, which it makes."""
    gather, *rest = chain
    group, dtype = gather.args[1], result.dtype
    shape = (shard.shape[0] * group.size(), *shard.shape[1:])
    swaps: dict[Any, Proxy] = {}
    for bsym in chain:
        (output,) = bsym.flat_proxy_outs
        named = output.replace(name=f"{output.name}_{result.name}", dtype=dtype, shape=shape)
        swaps[variableify(output)] = result if bsym is chain[-1] else named
    future = swaps[variableify(gather.output)]
    yield all_gather.bind(shard, group, to_torch_dtype(dtype), output=future)
    yield from (bsym.from_bsym_swap_proxies(swaps) for bsym in rest)
