"""The ways to carry a call out: whole or in tiles, with values in fp8 or none, and with which allocator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

LOSS_DIVISORS = (1, 4, 16)
"""What the tokens of a loss's tile are divided by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How one call is carried out."""

    is_tiled: bool = False
    """Whether wide values of tokens are in tiles: `Traces.tiled`."""
    loss_divisor: int = 1
    """What the tokens of a loss's tile are divided by, of as many as it has without a budget."""
    compresses: bool = False
    """Whether values may be stored in fp8 from forward to backward."""
    empties_cache: bool = False
    """Whether what is cached may be given back when a budget of reserved bytes is reached."""

    @property
    def with_smaller_losses(self) -> Way | None:
        """The same with fewer tokens in a loss's tile; None: they are as few as they get."""
        return self._with_divisor(
            min((n for n in LOSS_DIVISORS if n > self.loss_divisor), default=None)
        )

    @property
    def with_smallest_losses(self) -> Way | None:
        """The same with the fewest; None: it has them."""
        return self._with_divisor(
            max((n for n in LOSS_DIVISORS if n > self.loss_divisor), default=None)
        )

    def _with_divisor(self, divisor: int | None) -> Way | None:
        return None if divisor is None else replace(self, loss_divisor=divisor)


def ways(*, is_reserved: bool, may_compress: bool = False) -> Iterator[Way]:
    """Yield the ways with the largest tiles of losses, from the one that costs least.

    Args:
        is_reserved: Whether the budget is one of reserved bytes.
        may_compress: Whether values may be stored in fp8.
    """
    for empties_cache in (False, True) if is_reserved else (False,):
        for is_tiled in (False, True):
            for compresses in (False, True) if may_compress else (False,):
                yield Way(is_tiled=is_tiled, compresses=compresses, empties_cache=empties_cache)
