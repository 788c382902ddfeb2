"""A shuffle that is computed has every number once, and orders that look drawn by chance."""

from __future__ import annotations

import numpy as np
import pytest

from thunder_memsave.finetune.data.stored.permutation import permuted, permuted_one


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4097])
def test_every_number_is_there_once(total: int) -> None:
    for key in ("1 0", "1 1", "another"):
        found = permuted(np.arange(total), total, key=key)
        assert sorted(found.tolist()) == list(range(total))
        some = range(0, total, 1 + total // 50)
        assert [permuted_one(each, total, key=key) for each in some] == found[some].tolist()


def test_a_piece_of_the_order_needs_no_other_piece() -> None:
    whole = permuted(np.arange(1000), 1000, key="a")
    pieces = [
        permuted(np.arange(start, start + 100), 1000, key="a") for start in range(0, 1000, 100)
    ]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert permuted(np.array([999]), 1000, key="a").tolist() == [whole[999]]


def test_orders_of_different_keys_have_nothing_in_common() -> None:
    orders = [permuted(np.arange(4000), 4000, key=f"1 {epoch}") for epoch in range(4)]
    for first in range(4):
        for second in range(first):
            # One number is expected to have the same place; 12 have a chance below 1e-9.
            assert int((orders[first] == orders[second]).sum()) < 12
    # Neighbours do not stay neighbours.
    assert int((np.abs(np.diff(orders[0])) == 1).sum()) < 20


@pytest.mark.parametrize("total", [3, 6, 50, 1023, 1024, 1100])
def test_each_number_comes_to_each_place_equally_often(total: int) -> None:
    num_keys, parts = (2000, total) if total <= 50 else (200, 8)
    counts = np.zeros((parts, parts))
    numbers = np.arange(total)
    for key in range(num_keys):
        found = permuted(numbers, total, key=str(key))
        np.add.at(counts, (numbers * parts // total, found * parts // total), 1)
    expected = num_keys * total / parts**2
    # Five standard deviations.
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)


def test_numbers_beyond_any_memory_are_permuted() -> None:
    total = 10**15
    found = permuted(np.arange(total - 1000, total), total, key="a")
    assert len(set(found.tolist())) == 1000
    assert 0 <= found.min() < total // 100 < total - total // 100 < found.max() < total
