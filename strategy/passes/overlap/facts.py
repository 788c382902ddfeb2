"""Properties of a trace's symbols for overlap: kinds and bytes of collectives, and which operations compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_memsave.ops.families.collectives import (
    is_all_gather,
    is_all_reduce,
    is_reduce_scatter,
)
from thunder_memsave.ops.host_copies.weights import is_fetch
from thunder_memsave.passes.symbols import is_tensor

Kind = tuple[Any, ...]  # the collective, dtype, device, the group's id


def operations_of(symbols: Sequence[BoundSymbol]) -> Mapping[int, int]:
    """Number the symbols that compute, by their ids.

    Symbols that only prepare a gathered parameter (its wait, a slice of padding rows, a transpose) have no number.
    """
    computing = (b for b, source in with_sources(symbols) if source is None)
    return {id(b): number for number, b in enumerate(computing)}


def with_sources(
    symbols: Sequence[BoundSymbol],
) -> Iterator[tuple[BoundSymbol, str | None]]:
    """Yield each symbol with the future of the gather that alone decides its results, if there is one."""
    source_of: dict[str, str] = {}
    for bsym in symbols:
        source = bsym.output.name if is_all_gather(bsym) else _only_source(bsym, source_of)
        if source is not None:
            source_of.update((o.name, source) for o in bsym.flat_proxy_outs)
        yield bsym, source


def _only_source(bsym: BoundSymbol, source_of: Mapping[str, str]) -> str | None:
    inputs = [a.name for a in bsym.flat_proxy_args if is_tensor(a)]
    return source_of.get(inputs[0]) if len(inputs) == 1 else None


def is_reduction(bsym: BoundSymbol) -> bool:
    """Return whether it averages over ranks."""
    return is_reduce_scatter(bsym) or is_all_reduce(bsym)


def largest_reduction(symbols: Sequence[BoundSymbol]) -> int:
    """Return the bytes that the largest reduction sends; 0 without any."""
    return max((nbytes_of(b.args[0]) for b in symbols if is_reduction(b)), default=0)


def kind_of(bsym: BoundSymbol) -> Kind:
    """Return the key of a gather or reduction; those with equal keys can share a collective."""
    if is_fetch(bsym):  # each is a copy of its own
        return bsym.sym.name, bsym.output.name
    _, group, *how = bsym.args
    return bsym.sym.name, *how, bsym.output.dtype, bsym.output.device, id(group)


def nbytes_of(tensor: TensorProxy | FutureTensorProxy) -> int:
    """Return the bytes of a tensor or of the future of one."""
    return int(tensor.numel) * int(tensor.dtype.bytes)
