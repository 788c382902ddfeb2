"""Random bits are those of a formula, do not depend on where a tensor is cut, and look random."""

from __future__ import annotations

import pytest
import torch

from thunder_memsave.aten.random_bits import key_of, key_of_seed, random_bits

CPU = torch.device("cpu")
SHAPE = torch.Size((64, 3, 100))


def bits(first_row: int = 0, num_rows: int = 64, key: int = 5) -> torch.Tensor:
    shape = torch.Size((num_rows, *SHAPE[1:]))
    return random_bits(shape, key=key, first_row=first_row, device=CPU)


def mixed(x: int) -> int:
    """Hash as its author wrote it in C."""
    x ^= x >> 16
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = x * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_bits_are_those_of_the_formula() -> None:
    found = bits(key=key_of(42, 3, 1)).view(64, -1)
    for row, column in ((0, 0), (1, 0), (17, 299), (63, 101)):
        of_row = mixed((row + key_of(42, 3, 1)) % 2**32)
        expected = mixed((of_row + column * 0x9E3779B9) % 2**32)
        assert found[row, column].item() % 2**32 == expected


def test_rows_have_the_same_bits_wherever_the_tensor_is_cut() -> None:
    parts = [bits(first_row=start, num_rows=16) for start in range(0, 64, 16)]
    assert torch.equal(torch.cat(parts), bits())


def test_bits_look_random() -> None:
    """Each of 32 bits is set in half of 19,200 elements, and agrees with its neighbours and the next step in half."""
    found = bits()
    others = (found.roll(1, 0), found.roll(1, 2), bits(key=6), bits(key=key_of(5)))
    for bit in range(32):
        one = (found >> bit) & 1
        assert abs(one.double().mean() - 0.5) < 0.02
        for other in others:
            assert abs((one == (other >> bit) & 1).double().mean() - 0.5) < 0.02


def test_keys_differ_with_each_number() -> None:
    keys = {
        key_of(seed, step, weight) for seed in range(8) for step in range(8) for weight in range(8)
    }
    assert len(keys) == 8**3
    assert key_of(1, 2**32) != key_of(1, 0)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40 + 5, 2**62 - 1])
def test_a_key_of_a_seed_is_the_hash_of_its_halves(seed: int) -> None:
    for number in (0, 1):
        halves = seed % 2**32, seed >> 32
        of_low = mixed((halves[0] + key_of(number)) % 2**32)
        expected = mixed(((of_low ^ halves[1]) + 0x9E3779B9) % 2**32)
        found = key_of_seed(torch.tensor([seed]), number)
        assert found.dtype == torch.int32
        assert found.item() % 2**32 == expected
        as_number = random_bits(SHAPE, key=expected, first_row=2, device=CPU)
        assert torch.equal(random_bits(SHAPE, key=found, first_row=2, device=CPU), as_number)
