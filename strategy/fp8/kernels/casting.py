"""What all casts to fp8 by PyTorch share: chunks that stay in the cache, magnitudes without NaN, and saturation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CAST_ELEMENTS = {"cpu": 2**18, "cuda": 2**22}
"""Number of elements cast at a time, so that intermediates of a cast stay in the cache: 1 MiB in float32 on the CPU,
16 MiB on GPUs, whose L2 cache holds at least 24 MiB from Ada on."""


def cached(x: Tensor, rows: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the chunks of x to cast, each small enough for the cache."""
    most = _CAST_ELEMENTS["cpu" if x.device.type == "cpu" else "cuda"]
    return chunks(rows, x.numel() // max(rows, 1), most, multiple)


def chunks(
    rows: int, columns: int, num_elements: int, multiple: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows), whole blocks of `multiple` rows at a time."""
    step = max(num_elements // max(columns, 1) // multiple, 1) * multiple
    for first in range(0, rows, step):
        yield first, min(step, rows - first)


def magnitudes(x: Tensor) -> Tensor:
    """Return |x|, with 0 for NaN: an amax ignores them."""
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf)


def saturated(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp to the largest number of `dtype`, in place; NaN stays."""
    # Casts of some torch versions turn too large values into NaN or infinity; clamping keeps NaN.
    largest = torch.finfo(dtype).max
    return scaled.clamp_(-largest, largest)
