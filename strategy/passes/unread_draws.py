"""Keeps draws of random numbers that nothing reads: what is drawn after them is another number without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_memsave.passes.symbols import emptied, is_unread_draw


def keep(draw: BoundSymbol) -> None:
    """Tag a draw that nothing reads: no step drops it."""
    draw.tags.add(OpTags.DONT_DCE)


def draw_in_forward(
    forward: TraceCtx, backward: TraceCtx | None, joint: TraceCtx
) -> tuple[TraceCtx, TraceCtx | None]:
    """Return the traces with the draws that nothing reads in forward, in their places, and there alone.

    Args:
        forward: Of the joint trace; Thunder's split has left out what neither its results nor backward read.
        backward: Likewise; has draws that nothing may drop.
        joint: The trace that was split.

    Returns:
        The very same ones where there are no such draws.
    """
    there = {o.name for bsym in forward.bound_symbols for o in bsym.flat_proxy_outs}
    lost = _lost(joint.bound_symbols, there | {a.name for a in forward.args})
    if not lost:
        return forward, backward
    place = {o.name: i for i, b in enumerate(forward.bound_symbols) for o in b.flat_proxy_outs}
    before: dict[int, list[BoundSymbol]] = {}
    at = 0
    for bsym in joint.bound_symbols:
        if id(bsym) in lost:
            before.setdefault(at, []).append(bsym)
        else:
            at = max([at, *(place[o.name] + 1 for o in bsym.flat_proxy_outs if o.name in place)])
    new = emptied(forward)
    for index, bsym in enumerate(forward.bound_symbols):
        new.bound_symbols += [*before.get(index, ()), bsym]
    return new, None if backward is None else _without(backward, before)


def _without(backward: TraceCtx, drawn: Mapping[int, Sequence[BoundSymbol]]) -> TraceCtx:
    """Return the backward without what forward draws, unless it reads that."""
    names = {o.name for symbols in drawn.values() for bsym in symbols for o in bsym.flat_proxy_outs}
    read = {
        a.name
        for bsym in backward.bound_symbols
        for a in bsym.flat_proxy_args
        if names.isdisjoint(o.name for o in bsym.flat_proxy_outs)
    }
    new = emptied(backward)
    new.bound_symbols = [
        bsym
        for bsym in backward.bound_symbols
        if not bsym.flat_proxy_outs
        or any(o.name not in names or o.name in read for o in bsym.flat_proxy_outs)
    ]
    return new


def _lost(symbols: Sequence[BoundSymbol], there: set[str]) -> set[int]:
    """Return the identities of the draws that are not there, and of what they alone read."""
    needed: set[str] = set()
    lost: set[int] = set()
    for bsym in reversed(symbols):
        made = {o.name for o in bsym.flat_proxy_outs}
        if made and made.isdisjoint(there) and (is_unread_draw(bsym) or made & needed):
            lost.add(id(bsym))
            needed.update(a.name for a in bsym.flat_proxy_args)
    return lost
