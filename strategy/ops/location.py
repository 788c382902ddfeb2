"""Tags the operations of a trace with their place in the user's code, and keeps it through transforms.

Thunder keeps a bound symbol's line until a transform replaces the symbol. Transforms copy tags, so a tag keeps the line
through differentiation and execution.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from thunder.core.symbol import BoundSymbol

_OF_MODULES = re.compile(r"(?:\.__dict__)?(?:\['_modules'\]|\._modules)\['([^']*)'\]")


@dataclass(frozen=True, slots=True)
class Location:
    """A source line, and the module that ran it."""

    source: str = ""
    """`file:line`; empty if unknown."""
    module: str = ""
    """Dotted name of the module, such as `model.layers.3.mlp`; empty for the outermost one."""


def locate(symbols: Iterable[BoundSymbol], place: Location) -> None:
    """Tag the symbols and their subsymbols that have no location yet."""
    for bsym in symbols:
        if location(bsym) is None:
            bsym.tags.add(place)
        locate(bsym.subsymbols, place)


def location(bsym: BoundSymbol) -> Location | None:
    """Return the location of a symbol; None if it has none."""
    return next((tag for tag in bsym.tags if isinstance(tag, Location)), None)


def module_name(stack: Mapping[str, tuple[str, Any]] | None) -> str:
    """Return the name of the innermost module in a node's `nn_module_stack`."""
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    return _without_tables(path)


@lru_cache(maxsize=4096)
def _without_tables(path: str) -> str:
    # `L['self'].model.layers.0`, in adapters `L['self'].__dict__['_modules']['base_model'].model`, and `L['self']`.
    return ".".join(_OF_MODULES.sub(r".\1", path).split(".")[1:])
