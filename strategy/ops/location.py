"""Where in the user's code an operation of a trace comes from; it stays with what the operation becomes.

Thunder keeps a bound symbol's line until a transform replaces the symbol. Tags, which transforms hand on, keep it
through differentiation and execution.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from thunder.core.symbol import BoundSymbol

_OF_MODULES = re.compile(r"(?:\.__dict__)?(?:\['_modules'\]|\._modules)\['([^']*)'\]")


@dataclass(frozen=True, slots=True)
class Location:
    """A line, and the module that ran it."""

    source: str = ""
    """`file:line`; empty where unknown."""
    module: str = ""
    """Such as `model.layers.3.mlp`; empty for the outermost one."""


def locate(symbols: Iterable[BoundSymbol], place: Location) -> None:
    """Say of symbols, and of what they consist of, where they come from, where nothing is said yet."""
    for bsym in symbols:
        if location(bsym) is None:
            bsym.tags.add(place)
        locate(bsym.subsymbols, place)


def location(bsym: BoundSymbol) -> Location | None:
    """What is known of a symbol; None for nothing."""
    return next((tag for tag in bsym.tags if isinstance(tag, Location)), None)


def module_name(stack: Mapping[str, tuple[str, Any]] | None) -> str:
    """Of the innermost module of what Dynamo keeps with a node (`nn_module_stack`)."""
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    # `L['self'].model.layers.0`, in adapters `L['self'].__dict__['_modules']['base_model'].model`, and `L['self']`.
    return ".".join(_OF_MODULES.sub(r".\1", path).split(".")[1:])
