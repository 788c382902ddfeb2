"""Copies tensors that backward reads before forward overwrites them, as eager PyTorch does for in-place operations.

Before, where backward reads `a`:

    t1 = torch.nn.functional.silu(a)
    t2 = copy_(t1, a)

After:

    t1 = torch.nn.functional.silu(a)
    before_a = clone(a)                   # backward reads this instead of `a`
    after_a_t1 = fence(t1, before_a)      # t1; keeps the clone in forward, as forward's result now depends on it
    t2 = copy_(after_a_t1, a)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from thunder.core import prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, tracectx
from thunder.executors import torchex

from thunder_memsave.passes.fence import fence
from thunder_memsave.passes.repeatable import roots
from thunder_memsave.passes.symbols import (
    emptied,
    forward_symbols,
    is_joint,
    renamed,
    written_in_place,
)


def keep_overwritten(trace: TraceCtx) -> TraceCtx:
    """Copy each tensor that backward reads right before a symbol of forward overwrites it.

    Args:
        trace: A joint trace, with operations claimed by executors; an inference trace is returned unchanged.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols) or not any(written_in_place(b) is not None for b in symbols):
        return trace
    forward, memory = forward_symbols(symbols), roots(symbols)
    copied = _overwritten(symbols, forward, memory)
    if not copied:
        return trace
    new = emptied(trace)
    with tracectx(new):
        before = {t.name: t.replace_name(f"before_{t.name}") for ts in copied.values() for t in ts}
        new.bound_symbols = list(_rewritten(symbols, forward, copied, before))
    new.set_provenance(TraceProvenance("Joint pass keep_overwritten"))
    return new


def _overwritten(
    symbols: Sequence[BoundSymbol], forward: Set[int], memory: Mapping[str, Set[str]]
) -> Mapping[int, list[TensorProxy]]:
    """Return, by the id of each writing symbol, the live tensors that backward reads and the write overwrites."""
    read = _read_by_backward(symbols, forward)
    live: dict[str, TensorProxy] = {}
    found: dict[int, list[TensorProxy]] = {}
    for bsym in symbols:
        if id(bsym) not in forward:
            continue
        written = written_in_place(bsym)
        if written is not None:
            touched = memory.get(written, {written})
            lost = [t for n, t in live.items() if memory.get(n, {n}) & touched]
            found[id(bsym)] = lost
            for t in lost:
                del live[t.name]
        live.update((t.name, t) for t in _tensors(bsym.flat_proxy_outs) if t.name in read)
    return {number: lost for number, lost in found.items() if lost}


def _read_by_backward(symbols: Sequence[BoundSymbol], forward: Set[int]) -> set[str]:
    return {
        t.name
        for b in symbols
        if id(b) not in forward and b.sym is not prims.python_return
        for t in _tensors(b.flat_proxy_args)
    }


def _tensors(proxies: Iterable[Proxy]) -> Iterator[TensorProxy]:
    return (p for p in proxies if isinstance(p, TensorProxy))


def _rewritten(
    symbols: Sequence[BoundSymbol],
    forward: Set[int],
    copied: Mapping[int, Sequence[TensorProxy]],
    before: Mapping[str, Proxy],
) -> Iterator[BoundSymbol]:
    for bsym in symbols:
        source = bsym.args[0] if bsym.args else None
        for tensor in copied.get(id(bsym), ()):
            assert isinstance(source, TensorProxy)
            yield torchex.clone.bind(tensor, output=before[tensor.name])
            behind = source.replace_name(f"after_{tensor.name}_{source.name}")
            yield fence.bind(source, before[tensor.name], output=behind)
            source = behind
        is_read_late = id(bsym) not in forward and bsym.sym is not prims.python_return
        if id(bsym) in copied:
            bsym = bsym.from_bsym(args=(source, *bsym.args[1:]))
        reads = {a.name for a in bsym.flat_proxy_args} if is_read_late else set()
        yield (renamed(bsym, before, skip_output=True) if reads & before.keys() else bsym)
