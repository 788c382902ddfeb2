"""Small modules such as users write, by what is special about them; `PLAIN` has all of them by name."""

from __future__ import annotations

from plain_kinds import (
    arguments,
    attention,
    control_flow,
    custom_functions,
    drawn,
    hooks,
    images,
    in_pieces,
    in_place,
    library_operators,
    losses,
    numerics,
    parametrization,
    recurrence,
    scatter,
    state,
    views,
)
from plain_kinds.registry import PLAIN, Plain

__all__ = ["GROUPS", "PLAIN", "Plain"]
GROUPS = (
    scatter,
    recurrence,
    parametrization,
    in_place,
    state,
    hooks,
    custom_functions,
    library_operators,
    drawn,
    views,
    control_flow,
    arguments,
    in_pieces,
    numerics,
    images,
    attention,
    losses,
)
"""The files."""
