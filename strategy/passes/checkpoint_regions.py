"""Finds the values of a trace that the user's model recomputes with `torch.utils.checkpoint`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_memsave.passes.symbols import forward_symbols, is_joint, is_tensor


@dataclass(frozen=True, slots=True)
class Region:
    """Tags the symbols of one outermost checkpointed region; transforms keep tags."""

    number: int


def mark(symbols: Iterable[BoundSymbol], region: Region) -> None:
    """Tag symbols and their subsymbols as part of a region."""
    for bsym in symbols:
        bsym.tags.add(region)
        mark(bsym.subsymbols, region)


def checkpointed(trace: TraceCtx) -> frozenset[str]:
    """Return the names of the tensors made in a region that forward neither reads outside of it nor returns.

    Args:
        trace: A joint trace, with operations claimed by executors; for any other trace the result is empty.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols):
        return frozenset()
    forward = forward_symbols(symbols)
    region_of: dict[str, Region] = {}
    leaving = {o.name for o in symbols[-1].args[0]["fw_flat_out"] if isinstance(o, Proxy)}
    for bsym in symbols:
        if id(bsym) not in forward:
            continue
        region = next((tag for tag in bsym.tags if isinstance(tag, Region)), None)
        read = {a.name for a in bsym.flat_proxy_args}
        leaving.update(name for name in read if region_of.get(name, region) != region)
        if region is not None:
            region_of.update((o.name, region) for o in bsym.flat_proxy_outs if is_tensor(o))
    return frozenset(region_of) - leaving
