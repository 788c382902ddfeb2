"""FLOPs of attention are those of positions that attend to each other, and no formula ends a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import flop_registry

from thunder_memsave.aten.attention_flops import attention_flops
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.ops.families.attention_kernels import cuda_cudnn, cuda_efficient, cuda_flash
from thunder_memsave.ops.families.packed_attention import boundaries_of
from thunder_memsave.ops.families.packed_kernels import cpu_packed, cuda_packed
from thunder_memsave.ops.operation import Kernel

CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ROWS, HEADS, LENGTH, WIDTH = 2, 4, 16, 8
SQUARE = 2 * ROWS * HEADS * LENGTH * LENGTH * WIDTH
"""FLOPs of one of the products, two of which are forward and five backward."""


def heads(num: int = HEADS, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, num, LENGTH, WIDTH)


def counted(run: Callable[..., Any], *args: Any) -> tuple[int, Any]:
    with AtenRecord() as record:
        results = run(*args)
    return record.flops, results


def both(
    forward: Callable[..., Any], backward: Callable[..., Any], num_keys: int, *settings: Any
) -> tuple[int, int]:
    query, key = heads(), heads(num_keys)
    flops, results = counted(forward, query, key, key, *settings)
    backward_flops, _ = counted(backward, query, query, key, key, *results, *settings)
    return flops, backward_flops


def of_kernel(kernel: Kernel, num_keys: int, *settings: Any) -> tuple[int, int]:
    return both(kernel.run, kernel.derivatives[0].run, num_keys, *settings)


@pytest.mark.parametrize("num_keys", [HEADS, 2], ids=["heads", "grouped queries"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernel_for_the_cpu_counts_the_heads_of_the_queries(
    num_keys: int, is_causal: bool
) -> None:
    flops = both(CPU_FLASH, CPU_FLASH_BACKWARD, num_keys, 0.0, is_causal)
    assert flops == ((SQUARE, 5 * SQUARE // 2) if is_causal else (2 * SQUARE, 5 * SQUARE))


@pytest.mark.parametrize("is_causal", [True, False])
def test_kernels_for_cuda_count_half_of_the_square_where_they_are_causal(is_causal: bool) -> None:
    expected = (SQUARE, 5 * SQUARE // 2) if is_causal else (2 * SQUARE, 5 * SQUARE)
    with FakeTensorMode():
        for num_keys in (HEADS, 2):
            for kernel in (cuda_flash, cuda_cudnn):
                assert of_kernel(kernel, num_keys, None, is_causal, None) == expected
        assert of_kernel(cuda_efficient, HEADS, None, is_causal, None) == expected


def test_packed_rows_count_each_document_alone() -> None:
    ends = torch.tensor([[4, 8, 8], [2, 12, 16]], dtype=torch.int32)
    boundaries = boundaries_of(ends, LENGTH)
    squares = sum(n * n for n in (4, 4, 2, 10, 4))
    pairs = HEADS * squares // 2
    flops = of_kernel(cpu_packed, HEADS, boundaries, None)
    assert flops == (2 * 2 * pairs * WIDTH, 2 * 5 * pairs * WIDTH)


def test_documents_within_a_window_count_its_pairs() -> None:
    ends = torch.tensor([[4, 8, 8], [2, 12, 16]], dtype=torch.int32)
    # The kernel takes the padding after the first row's documents for a document of 8.
    doubled = sum(n * n for n in (4, 4, 2, 4)) + 6 * (2 * 8 - 6) + 6 * (2 * 10 - 6)
    given = {
        "query": torch.empty(ROWS * LENGTH, HEADS, WIDTH),
        "key": torch.empty(ROWS * LENGTH, HEADS, WIDTH),
        "value": torch.empty(ROWS * LENGTH, HEADS, WIDTH),
        "cum_seq_q": boundaries_of(ends, LENGTH),
        "cum_seq_k": boundaries_of(ends, LENGTH),
        "is_causal": True,
        "window_size_left": 5,
    }
    flops = attention_flops(torch.ops.aten._flash_attention_forward, given)
    assert flops == 2 * 2 * WIDTH * HEADS * doubled // 2


def test_documents_that_are_not_known_fill_rows_within_a_window_too() -> None:
    with FakeTensorMode():
        boundaries = torch.empty(ROWS * 4 + 1, dtype=torch.int32)
        flops = of_kernel(cuda_packed, HEADS, boundaries, None, 4)
    pairs = ROWS * HEADS * 4 * (2 * LENGTH - 4) // 2
    assert flops == (2 * 2 * pairs * WIDTH, 2 * 5 * pairs * WIDTH)


@pytest.mark.parametrize("kernel", [cpu_packed, cuda_packed], ids=lambda k: k.name)
def test_documents_that_are_not_known_are_taken_to_be_whole_rows(kernel: Any) -> None:
    with FakeTensorMode():
        boundaries = torch.empty(ROWS * 4 + 1, dtype=torch.int32)
        flops = both(kernel.run, kernel.derivatives[0].run, HEADS, boundaries, None)
    assert flops == (SQUARE, 5 * SQUARE // 2)


def test_eight_documents_of_512_cost_what_they_cost_alone() -> None:
    query = torch.randn(1, 2, 4096, 8)
    boundaries = boundaries_of(torch.arange(512, 4097, 512, dtype=torch.int32)[None], 4096)
    packed, _ = counted(cpu_packed.run, query, query, query, boundaries, None)
    alone, _ = counted(CPU_FLASH, *(query[:, :, :512],) * 3, 0.0, True)
    masked, _ = counted(CPU_FLASH, query, query, query)
    assert packed <= 1.02 * 8 * alone
    assert masked == 16 * packed


def test_a_formula_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*args: Any, **kwargs: Any) -> int:
        raise AssertionError("shapes are incompatible")

    with patch.dict(flop_registry, {torch.ops.aten.mm: refuse}), AtenRecord() as record:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert record.flops == 0
    assert "the FLOPs of aten.mm are not counted: shapes are incompatible" in caplog.text


def test_attention_of_another_kind_is_counted_by_its_products() -> None:
    query = heads()
    with AtenRecord() as record, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(query, query, query)
    assert record.flops == 2 * SQUARE
