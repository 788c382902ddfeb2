"""What a record says of operators, on real and on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from harness.memory import measured_peak_bytes
from thunder_memsave.aten.record import (
    AtenRecord,
    allocated_bytes,
    as_one_kernel,
    once_through_memory,
    storage_id,
    turns_of,
)


def chain(x: torch.Tensor) -> torch.Tensor:
    """Two temporaries, the first of which dies before the result is made."""
    doubled = x * 2
    summed = doubled.t() + x
    del doubled
    return summed @ x


@pytest.mark.parametrize("is_fake", [False, True])
def test_the_peak_is_the_measured_one(is_fake: bool) -> None:
    x = torch.ones(64, 64)
    chain(x)
    measured = measured_peak_bytes(lambda: chain(x))
    with FakeTensorMode() as fake:
        given = fake.from_tensor(x) if is_fake else x
    with AtenRecord([given]) as record:
        result = chain(given)
    assert record.peak_bytes == 2 * 4 * 64 * 64
    assert record.live_bytes == 4 * 64 * 64
    del result
    assert record.live_bytes == 0
    assert measured - record.peak_bytes in (0, 12)  # the number 2 as a tensor of its own


def test_work_is_counted_as_torch_counts_it() -> None:
    x = torch.ones(1, 2, 16, 8)
    with FlopCounterMode(display=False) as expected:
        x @ x.transpose(-1, -2)
    with AtenRecord([x]) as record:
        x @ x.transpose(-1, -2)
    assert record.flops == expected.get_total_flops() > 0
    with AtenRecord([x]) as attention:
        scaled_dot_product_attention(x, x, x)
    assert attention.flops == 2 * expected.get_total_flops()


def test_views_move_nothing_and_an_embedding_moves_its_rows() -> None:
    table, indices = torch.ones(1000, 4), torch.tensor([1, 2, 3])
    with AtenRecord([table, indices]) as record:
        table.t()[1:3]
    assert (record.moved_bytes, record.peak_bytes) == (0, 0)
    with AtenRecord([table, indices]) as record:
        torch.nn.functional.embedding(indices, table)
    assert record.moved_bytes == 2 * 4 * 12 + 8 * 3


def test_memory_that_is_taken_is_not_moved() -> None:
    x = torch.ones(100)
    with AtenRecord([x]) as record:
        torch.empty_like(x), x.new_empty(1000)
        assert record.moved_bytes == 0
        torch.zeros_like(x), x.new_zeros(10)
    assert record.moved_bytes == 4 * (100 + 10)


def test_what_stays_in_the_cache_is_not_moved_and_is_there() -> None:
    x = torch.ones(100)
    with AtenRecord([x]) as outer:
        y = x + 1
        with AtenRecord([x, y]) as record, once_through_memory(x):
            (x * 2).exp_().sum()
        assert record.moved_bytes == 400
        assert record.peak_bytes == 400 + 4
        y.add_(1)
    assert outer.moved_bytes == 800 + 400 + 800


def test_what_is_moved_once_is_so_where_the_rest_fails() -> None:
    x, failed = torch.randn(64), pytest.raises(RuntimeError, match="size of tensor")
    with AtenRecord([x]) as record, failed, once_through_memory(x):
        x.add(1).add(torch.ones(3))
    assert record.moved_bytes == x.nbytes


def test_attention_is_random_with_dropout_only() -> None:
    x = torch.ones(1, 2, 16, 8)
    for probability in (0.0, 0.5):
        with AtenRecord([x]) as record:
            scaled_dot_product_attention(x, x, x, dropout_p=probability)
        assert record.is_random is (probability > 0)


def test_only_writes_to_what_exists_are_writes() -> None:
    x = torch.ones(4)
    with AtenRecord([x]) as record:
        (x + 1).mul_(2)
    assert not record.written
    with AtenRecord([x]) as record:
        x[1:].add_(1)
    assert record.written == {storage_id(x)}


def test_cuda_allocates_blocks_of_512_bytes() -> None:
    assert [allocated_bytes(n, "cuda") for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert allocated_bytes(513, "cpu") == 513


@pytest.mark.parametrize("num_turns", [0, 1, 3, 4, 9])
def test_turns_of_a_loop_without_numbers_are_counted_and_not_all_taken(num_turns: int) -> None:
    def run(turns: Iterable[int], x: torch.Tensor) -> None:
        for start in turns:
            for _ in turns_of(range(num_turns), x):
                part = x[start : start + 5] @ x.T
                part.add_(1.0)

    starts, found = range(0, 5 * num_turns - 2, 5), []
    with FakeTensorMode():
        x = torch.empty(max(starts.stop, 1), 4)
        for turns in (starts, turns_of(starts, x)):
            with AtenRecord((x,)) as record:
                run(turns, x)
            found.append((record.flops, record.moved_bytes, record.peak_bytes, record.live_bytes))
            num_allocations = len(record.allocations)
    assert found[0] == found[1]
    assert num_allocations <= 3 * 3 * 4
    real = torch.zeros(4)
    assert list(turns_of(range(0, 90, 10), real)) == list(range(0, 90, 10))


def test_one_kernel_makes_its_results_alone() -> None:
    with FakeTensorMode() as fake:
        x = fake.from_tensor(torch.ones(64, 32))
        with AtenRecord([x]) as record:
            (result,) = as_one_kernel(lambda t: [chain_of_two(t)], x)

    assert result.shape == (32, 64)
    assert result.stride() == (1, 32)
    assert record.peak_bytes == record.live_bytes == 4 * 64 * 32
    assert record.moved_bytes == 2 * 4 * 64 * 32
    assert not record.flops


def chain_of_two(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + x).t()


def test_bytes_of_products_are_counted_apart() -> None:
    with FakeTensorMode() as fake:
        x = fake.from_tensor(torch.ones(64, 64))
        nbytes = 4 * 64 * 64
        with AtenRecord([x]) as record:
            product = x @ x
            product.add_(x)
            assert record.product_bytes == 3 * nbytes
            assert record.moved_bytes > record.product_bytes
            with once_through_memory(x):
                x @ x + x
            with once_through_memory(x):
                x + x
            assert record.product_bytes == 4 * nbytes
            before = record.product_bytes
            for _ in turns_of(range(10), x):
                x @ x
    assert record.product_bytes - before == 10 * 3 * nbytes
