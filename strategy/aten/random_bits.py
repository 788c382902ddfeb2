"""Random bits that are computed: a hash of a key and of an element's place, the same wherever a tensor is cut.

Nothing is stored, and no generator of PyTorch is used. Source of the hash: Wellons, Prospecting for Hash Functions,
`lowbias32`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_FACTORS = (0x7FEB352D, 0x846CA68B)
_GOLDEN = 0x9E3779B9


def key_of(*numbers: int) -> int:
    """Hash whole numbers to one of 32 bits."""
    key = 0
    for number in numbers:
        for part in (number & _MASK, number >> 32 & _MASK):
            key = _mixed_number((key ^ part) + _GOLDEN & _MASK)
    return key


def key_of_seed(seed: Tensor, number: int) -> Tensor:
    """Hash a seed and a number to a key, by operators, which need no value: on tensors without data too.

    Args:
        seed: int64 `[1]`.
        number: Tells keys of one seed apart.

    Returns:
        int32 `[1]`.
    """
    low, high = seed.bitwise_and(_MASK), (seed >> 32).bitwise_and(_MASK)
    key = _mixed(_wrapped(low).add_(_as_int32(key_of(number))))
    return _mixed(key.bitwise_xor_(_wrapped(high)).add_(_as_int32(_GOLDEN)))


def uniform(values: Tensor, *, key: int | Tensor, first_row: int) -> Tensor:
    """Return a random number from 0 to 1, without 1, for each element of these rows: float32."""
    bits = random_bits(values.shape, key=key, first_row=first_row, device=values.device)
    return bits.bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def random_bits(
    shape: torch.Size, *, key: int | Tensor, first_row: int, device: torch.device
) -> Tensor:
    """Return 32 random bits for each element of these rows: int32.

    Args:
        shape: `[rows, ...]`.
        key: A number of 32 bits, or one as int32 `[1]`.
        first_row: Number of the first row in the whole tensor.
        device: Where the bits are.
    """
    num_columns = shape[1:].numel()
    rows = torch.arange(first_row, first_row + shape[0], dtype=torch.int32, device=device)
    columns = torch.arange(num_columns, dtype=torch.int32, device=device)
    rows = _mixed(rows.add_(key if isinstance(key, Tensor) else _as_int32(key)))
    found = torch.add(rows.unsqueeze(1), columns.mul_(_as_int32(_GOLDEN)))
    return _mixed(found).view(shape)


def _mixed(x: Tensor) -> Tensor:
    """Hash each element, in place; products and sums of int32 wrap."""
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        _xor_shifted(x, shift).mul_(_as_int32(factor))
    return _xor_shifted(x, 16)


def _xor_shifted(x: Tensor, shift: int) -> Tensor:
    # The shift of int32 copies the sign.
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1))


def _mixed_number(x: int) -> int:
    for shift, factor in zip((16, 15), _FACTORS, strict=True):
        x = (x ^ x >> shift) * factor & _MASK
    return x ^ x >> 16


def _wrapped(x: Tensor) -> Tensor:
    """Return numbers of 32 bits, of int64, as int32."""
    return torch.where(x >= 1 << 31, x - (1 << 32), x).int()


def _as_int32(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number
