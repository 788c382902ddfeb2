"""Makes the tiles of losses smaller, where a plan has less room than they take.

Before, with 1,024 tokens and 32,000 classes:

    (loss, gradients) = linear_cross_entropy_hidden(hidden, weight, None, None, targets, 1024, ..., 512)

After, with a quarter of the tokens in a tile:

    (loss, gradients) = linear_cross_entropy_hidden(hidden, weight, None, None, targets, 1024, ..., 128)

Tiles of fewer tokens read the weight more often, and add up a trained weight's gradient in more parts.
"""

from __future__ import annotations

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace

from thunder_memsave.ops.table import place_of_rows_per_tile

FEWEST_ROWS = 16
"""Tokens of a tile at least: below that, a product reads more weight than it computes."""


def divide_loss_tiles(trace: TraceCtx, divisor: int) -> TraceCtx:
    """Divide the tokens of each tile.

    Args:
        trace: Any trace whose operations are claimed.
        divisor: What their number is divided by, rounded up; no tile gets fewer than `FEWEST_ROWS`.

    Returns:
        The very same trace, if no tile gets smaller.
    """
    symbols = [_divided(bsym, divisor) for bsym in trace.bound_symbols]
    if all(new is old for new, old in zip(symbols, trace.bound_symbols, strict=True)):
        return trace
    new = from_trace(trace)
    new.bound_symbols = symbols
    new.set_provenance(TraceProvenance("Joint pass divide_loss_tiles"))
    return new


def _divided(bsym: BoundSymbol, divisor: int) -> BoundSymbol:
    place = place_of_rows_per_tile(bsym.sym.name)
    if place is None:
        return bsym
    args = list(bsym.args)
    rows = max(-(-args[place] // divisor), min(args[place], FEWEST_ROWS))
    if rows == args[place]:
        return bsym
    args[place] = rows
    return bsym.from_bsym(args=tuple(args))
