"""Shuffles any count of numbers without a list of them: each position's number is computed."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Bits: TypeAlias = Any
"""An int of 64 bits, or an array of uint64: both take the same operations."""

_NUM_ROUNDS = 8
_SORTED_BELOW = 1024
"""A network of so few numbers would prefer some orders; they are sorted by hashes."""
_MULTIPLIER, _ALL_BITS = 0xBF58476D1CE4E5B9, (1 << 64) - 1


def permuted(positions: Numbers, total: int, *, key: str) -> Numbers:
    """Return the numbers at some positions of a shuffled `range(total)`, in constant memory.

    A Feistel network permutes the smallest range of 2^(2k) numbers that has all positions; numbers beyond `total` are
    sent through it again until they are below (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002). It is fewer than 4 times as large, so that 4 passes do on average at most.

    Args:
        positions: From 0 to below `total`; any shape of one axis.
        total: Count of the shuffled numbers.
        key: Decides the order: equal for equal keys, on every machine.
    """
    if total < _SORTED_BELOW:
        return _by_hash(total, key)[positions]
    half_bits, keys = _half_bits(total), _round_keys(key)
    found = _encrypted(positions.astype(np.uint64), half_bits, keys)
    outside = np.flatnonzero(found >= total)
    while outside.size:
        found[outside] = _encrypted(found[outside], half_bits, keys)
        outside = outside[found[outside] >= total]
    return np.asarray(found, dtype=np.int64)


def permuted_one(position: int, total: int, *, key: str) -> int:
    """Return the number at one position; many times as fast as an array of one."""
    if total < _SORTED_BELOW:
        return int(_by_hash(total, key)[position])
    half_bits, keys = _half_bits(total), _round_keys(key)
    found = _encrypted(position, half_bits, keys)
    while found >= total:
        found = _encrypted(found, half_bits, keys)
    return int(found)


def _half_bits(total: int) -> int:
    return ((total - 1).bit_length() + 1) // 2


@lru_cache(maxsize=4)
def _by_hash(total: int, key: str) -> Numbers:
    """Return all numbers in the order of keyed hashes."""
    hashes = np.arange(total, dtype=np.uint64)
    for round_key in _round_keys(key):
        hashes = _mixed(hashes ^ np.uint64(round_key))
    return np.argsort(hashes, kind="stable")


@lru_cache(maxsize=4)
def _round_keys(key: str) -> tuple[int, ...]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return tuple(np.frombuffer(digest, dtype="<u8").tolist())


def _encrypted(numbers: Bits, half_bits: int, keys: tuple[int, ...]) -> Bits:
    """Permute numbers of `2 * half_bits` bits."""
    mask = (1 << half_bits) - 1
    left, right = numbers >> half_bits, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mixed((right + key) & _ALL_BITS) & mask)
    return (left << half_bits) | right


def _mixed(numbers: Bits) -> Bits:
    """Let every bit depend on all others: the last steps of splitmix64; a product is modulo 2^64."""
    numbers = ((numbers ^ (numbers >> 29)) * _MULTIPLIER) & _ALL_BITS
    return numbers ^ (numbers >> 32)
