"""A product in float32 of matrices that are dequantised a few chunks at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from thunder_memsave.fp8.kernels.casting import chunks

_CHUNK_ELEMENTS = 2**24
"""Number of elements of an operand that are in float32 at a time: 64 MiB, whatever its size."""

_ROWS_MULTIPLE = 128
"""Multiple of the rows of a chunk: the largest block of scales."""

Rows = Callable[[slice], Tensor]
"""Returns rows of a matrix in float32."""


def product_in_tiles(
    left: Rows,
    right: Rows,
    shape: tuple[int, int, int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    factor: Tensor | None = None,
) -> Tensor:
    """Multiply `factor * (left @ right.t()) + bias`, rounded once.

    Args:
        left: Rows of `[m, k]`.
        right: Rows of `[n, k]`.
        shape: `(m, n, k)`.
        bias: `[n]` or None.
        out_dtype: The result's dtype.
        factor: float32 `[1]`; None: 1.

    Returns:
        `[m, n]`.
    """
    m, n, k = shape

    def tile(a_rows: slice, b_rows: slice) -> Tensor:
        found = left(a_rows) @ right(b_rows).t()
        found = found if factor is None else found.mul_(factor)
        return found if bias is None else found.add_(bias[b_rows])

    tiles = [(a_rows, b_rows) for b_rows in _row_parts(n, k) for a_rows in _row_parts(m, k)]
    if len(tiles) == 1:  # avoids a copy of a float32 result
        return tile(*tiles[0]).to(out_dtype)
    product: Tensor | None = None
    for a_rows, b_rows in tiles:
        found = tile(a_rows, b_rows)
        if product is None:
            product = found.new_empty(m, n, dtype=out_dtype)
        product[a_rows, b_rows] = found
    assert product is not None
    return product


def _row_parts(rows: int, columns: int) -> Iterator[slice]:
    for first, length in chunks(rows, columns, _CHUNK_ELEMENTS, _ROWS_MULTIPLE):
        yield slice(first, first + length)
