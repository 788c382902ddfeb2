"""The 256 numbers of a state in 8 bits, and the bounds between them.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022 (arXiv:2110.02861), the dynamic map: seven
decades, each with twice the fractions of the one below it. The second moment has no sign, and twice as many. Other than
there, -1 is one of the numbers, in place of the least above it: the largest of a block is exact, whatever its sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thunder_memsave.aten.constant_tables import on_device_of

_DECADES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Numbers of codes and how codes are chosen."""

    numbers: Tensor
    """float32 by code; code 0 stands for 0, so that bytes of zeros are a state of zeros."""
    bounds: Tensor
    """255 ascending bounds; a number lies above as many of them as `first_code` and its code add up to."""
    first_code: int
    """How many numbers are below 0; their codes are the last ones."""
    per_gap: Tensor
    """1 / the distance to the next larger number, by code; 0 for the largest."""

    def on_device_of(self, like: Tensor) -> Table:
        """Return the table on the device of `like`."""
        return Table(
            numbers=on_device_of(like, self.numbers),
            bounds=on_device_of(like, self.bounds),
            first_code=self.first_code,
            per_gap=on_device_of(like, self.per_gap),
        )


def _made(*, signed: bool) -> Table:
    found = [0.0, 1.0]
    for exponent in range(_DECADES):
        num_fractions = 2 ** (exponent + (0 if signed else 1))
        ends = torch.linspace(0.1, 1, num_fractions + 1, device="cpu", dtype=torch.float64)
        fractions = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (exponent - _DECADES + 1)
        found += fractions.tolist() + (-fractions if signed else fractions[:0]).tolist()
    ascending = torch.tensor(sorted(found), device="cpu", dtype=torch.float64)
    if signed:
        ascending[0] = -1.0
    # The nearest number of those with a sign; the next smaller one of the others, which noise rounds up.
    bounds = (ascending[:-1] + ascending[1:]) / 2 if signed else ascending[1:]
    first_code = int((ascending < 0).sum())
    per_gap = torch.cat([1 / ascending.diff(), ascending.new_zeros(1)]).roll(-first_code)
    numbers = ascending.roll(-first_code)
    return Table(
        numbers=numbers.float(),
        bounds=bounds.float(),
        first_code=first_code,
        per_gap=per_gap.float(),
    )


# Made now: a plan may read them first, on tensors without numbers.
SIGNED = _made(signed=True)
UNSIGNED = _made(signed=False)
