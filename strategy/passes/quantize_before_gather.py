"""Gather fp8 numbers: a weight that only a cast to fp8 reads is cast by each rank, its own rows, before the gather.

For the recipe `delayed`, whose scale is known before the weight is. Half the bytes are sent, and half are gathered.
Before:

    ft1 = all_gather_rows(w, group, torch.bfloat16)
    t2 = torch_wait_prim_impl(ft1)                  # bf16, whole
    (t3, t4) = fp8_quantize_delayed_torch(t2, scale, history, 1, torch.float8_e4m3fn, True)

After:

    t5 = Tensor.to(w, torch.bfloat16)               # rows of this rank
    (t6, t4) = fp8_quantize_delayed_torch(t5, scale, history, 1, torch.float8_e4m3fn, True)
    ft1 = all_gather_rows(t6, group, torch.float8_e4m3fn)
    t3 = torch_wait_prim_impl(ft1)                  # fp8, whole

A cast is elementwise, so every number stays bit-identical. The largest magnitude that it records is that of the rank's
rows, padding being zeros; the ranks take the largest of theirs before scales are updated (`fp8/scaling.py`), which is
that of the weight. torchao reports a step that is 1.25 times as fast with such gathers (its float8 all-gather).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors import torchex

from thunder_memsave.passes.cast_before_gather import (
    chain_of_gather,
    gathered_as,
    with_casts_first,
)
from thunder_memsave.passes.symbols import records_amax


def gather_in_fp8(trace: TraceCtx) -> TraceCtx:
    """Cast shards to fp8 instead of whole weights, where nothing else reads these.

    Args:
        trace: A joint or an inference trace, with operations claimed by executors.

    Returns:
        A trace with the same values, in which such weights are gathered as fp8 numbers.
    """
    producers = {o.name: b for b in trace.bound_symbols for o in b.flat_proxy_outs}
    num_reads = Counter(p.name for b in trace.bound_symbols for p in b.flat_proxy_args)
    chains = {
        id(bsym): chain
        for bsym in trace.bound_symbols
        if records_amax(bsym) and (chain := chain_of_gather(bsym.args[0], producers))
        if all(num_reads[o.name] == 1 for each in chain for o in each.flat_proxy_outs)
    }
    return with_casts_first(trace, chains, _cast_first, name="gather_in_fp8")


def _cast_first(chain: Sequence[BoundSymbol], cast: BoundSymbol) -> Iterator[BoundSymbol]:
    """Yield the casts of the shard and the chain in fp8; its last value keeps the name of the cast's."""
    numbers, scale_inv = cast.output
    rows: TensorProxy = chain[0].args[0]
    compute_dtype = cast.args[0].dtype
    if rows.dtype != compute_dtype:
        name = f"{rows.name}_{numbers.name}_cast"
        in_compute_dtype = rows.replace(name=name, dtype=compute_dtype)
        yield torchex.to.bind(rows, to_torch_dtype(compute_dtype), output=in_compute_dtype)
        rows = in_compute_dtype
    of_rows = rows.replace(name=f"{rows.name}_{numbers.name}", dtype=numbers.dtype)
    yield cast.from_bsym(args=(rows, *cast.args[1:]), output=(of_rows, scale_inv))
    yield from gathered_as(chain, of_rows, numbers)
