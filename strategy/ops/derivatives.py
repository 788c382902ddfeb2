"""Finds the operations that Thunder cannot differentiate before it tries to, by the rules of its own transform."""

from __future__ import annotations

from collections.abc import Iterable

from thunder.core import prims
from thunder.core.symbol import BoundSymbol
from thunder.core.transforms import (
    _get_gradfn_and_executor,
    augmented_forward_impls,
    is_constant_for_vjp,
)

_ALWAYS = (prims.PrimIDs.SHALLOW_COPY, prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.RETURN)


def without_derivative(symbols: Iterable[BoundSymbol]) -> BoundSymbol | None:
    """Return the first primitive for which Thunder has no derivative, among symbols and what they are made of."""
    for bsym in symbols:
        if bsym.sym.id in _ALWAYS or is_constant_for_vjp(bsym) or _has_rule(bsym):
            continue
        if bsym.sym.is_prim:
            return bsym
        if (found := without_derivative(bsym.subsymbols)) is not None:
            return found
    return None


def _has_rule(bsym: BoundSymbol) -> bool:
    if bsym.sym.id in augmented_forward_impls:
        return True
    rule, _ = _get_gradfn_and_executor(bsym)
    return rule is not None
